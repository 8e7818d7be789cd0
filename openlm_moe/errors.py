"""The one exception that means: the person who started this can fix it."""


class UserError(Exception):
    """A mistake in flags, files or environment, told in one line: what is wrong with which value, and what to do.

    `openlm_moe.main` and the other commands print the message without a traceback and exit with code 2.
    """
