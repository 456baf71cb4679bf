"""Traffic of the exchanges: words of programs, predicted times, steps over real sockets."""
