"""Small motrix tasks: the published packages bring none.

``pendulum-ms`` and ``cartpole-ms`` run in motrixsim, ``pendulum-np`` is the same pendulum in numpy.  Importing the package
registers nothing; :func:`register` is the entry point in the group ``motrix_env_core.envs``.
"""

from __future__ import annotations


def register() -> None:
    """Register the tasks; called once by motrix's own discovery."""
    from . import cartpole, pendulum

    pendulum.register()
    cartpole.register()
