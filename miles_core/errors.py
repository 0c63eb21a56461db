"""The two kinds of failure a user meets, told apart by exit code."""


class InputError(ValueError):
    """Refused input: one sentence that says what, where and what to do. Exit code 2."""


class StageError(RuntimeError):
    """A stage failed; what was finished is kept and the same command resumes. Exit code 1."""


class StoreError(StageError):
    """The artifact root refuses, is full or does not answer; trying the same call again at once is of no use."""
