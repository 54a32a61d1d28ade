"""The errors that a user can cause and mend; the mains print their text as one line."""


class MoejaxError(Exception):
    """A mistake in the input, said in one line that names the thing and the mend."""
