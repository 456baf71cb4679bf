"""How much a step teaches: loss against steps and against words, of ways to train."""
