"""The built-in targets. `plugin` registers them; this package imports nothing, so that clients need few packages."""
