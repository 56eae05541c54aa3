"""What headwise and its peers do, asked in the same way: a file a peer, a function a question."""
