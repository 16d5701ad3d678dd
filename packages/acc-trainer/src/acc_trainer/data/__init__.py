"""The data law: a loader knows its epoch, the batches it handed out and the padding in this batch; the rest follows."""
