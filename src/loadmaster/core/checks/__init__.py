"""The single checks of :mod:`loadmaster.core.check`, one module a subject; each takes a case and yields findings."""
