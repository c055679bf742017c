"""What people paste -> the launch in it. Text is read, never run.

``text`` reads shell text (with ``paste``, ``shelllexer``, ``shell``, ``parameters``, ``windows``, ``invocation`` and
``docker``), ``compose``, ``kubernetes`` and ``settingsfile`` read parsed YAML, ``units`` reads supervisor and systemd
files. All return :class:`Found`.
"""

from __future__ import annotations

from loadmaster.core.commands.found import CommandError, Found

__all__ = ["CommandError", "Found"]
