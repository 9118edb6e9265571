"""Tests; a package, so that spawned processes find the classes that tests define."""
