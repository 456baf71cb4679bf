"""Claims of the papers and of this library, checked one by one."""
