"""The commands, one module a topic. Imported only when the command runs; heavy imports stay inside."""
