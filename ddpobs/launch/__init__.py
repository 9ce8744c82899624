"""`ddpobs run`: a command as a child process, with a small parent that outlives the ranks and reports those killed."""
