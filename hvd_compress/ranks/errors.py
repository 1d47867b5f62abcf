"""Errors that every rank raises."""


class ExchangeError(RuntimeError):
    """The ranks do not do the same thing, or the framework was asked for what compression cannot give.

    The step is lost and gathers may be left pending: end the job.
    """
