"""Tests of the worker; its worker classes are imported by spawned processes."""
