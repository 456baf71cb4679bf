"""What goes over the wire: words of the programs, predicted times, steps over real sockets."""
