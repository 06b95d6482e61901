"""Layers with a recurrent state: convolution and recurrence of tokens, of tree nodes, and what a row keeps of them."""
