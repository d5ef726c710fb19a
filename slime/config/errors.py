"""The one exception for configuration that cannot work."""


class ConfigError(ValueError):
    """Says in one line what is wrong, where, and how to fix it. The drivers print it without a traceback and exit 2."""
