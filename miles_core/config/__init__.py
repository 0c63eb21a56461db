from miles_core.config.run_config import (
    FIELDS,
    GROUPS,
    RunConfig,
    affects,
    build,
    by_content,
    choices,
    depending,
    flag,
    is_code,
    meaning,
)

__all__ = [
    "FIELDS",
    "GROUPS",
    "RunConfig",
    "affects",
    "build",
    "by_content",
    "choices",
    "depending",
    "flag",
    "is_code",
    "meaning",
]
