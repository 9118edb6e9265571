"""A lab of virtual machines with several NUMA nodes, by software emulation: tests/lab/README.md says how to use it."""
