"""The light half stays light, the root stays lazy, and what is public is what is said to be."""

from __future__ import annotations

import subprocess
import sys

import pytest

import numa_collectors

LIGHT = ("errors", "_cpulist", "_mempolicy", "_futex", "topo", "placement", "binding", "shm", "worker", "metrics")
HEAVY = ("torch", "numpy", "pydantic", "tensorboard", "rich", "psutil", "gymnasium", "numa", "yaml", "matplotlib")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_the_light_half_needs_the_standard_library_only() -> None:
    poison = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in HEAVY)
    imports = "".join(f"import numa_collectors.{name}\n" for name in LIGHT)
    result = run(poison + imports)
    assert result.returncode == 0, result.stderr


def test_the_poison_works() -> None:
    assert run("import sys\nsys.modules['torch'] = None\nimport numa_collectors.learner").returncode != 0


def test_collectors_need_no_torch() -> None:
    result = run(
        "import sys\nsys.modules['torch'] = None\nimport numa_collectors.collector, numa_collectors.collector.quota"
    )
    assert result.returncode == 0, result.stderr


def test_the_root_loads_nothing_until_it_is_asked() -> None:
    code = "import sys, numa_collectors\nprint(sorted(set(sys.modules) & {'torch', 'numpy', 'pydantic'}))"
    assert run(code).stdout.strip() == "[]"


def test_every_public_name_is_there_and_is_listed() -> None:
    for name in numa_collectors.__all__:
        assert getattr(numa_collectors, name) is not None
    assert set(numa_collectors.__all__) <= set(dir(numa_collectors))
    with pytest.raises(AttributeError, match="no_such_name"):
        numa_collectors.no_such_name  # noqa: B018 - the access is the test


def test_the_type_checkers_list_is_the_run_times() -> None:
    homes = {name for names in numa_collectors._HOMES.values() for name in names}
    assert {*homes, "__version__"} == set(numa_collectors.__all__)
