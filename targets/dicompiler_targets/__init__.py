"""The built-in targets. They come in by `plugin`; nothing is imported here, so that a client needs little."""
