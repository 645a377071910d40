"""Answers: the messages of `insitu.wire.views`, from the files and the index of a run."""
