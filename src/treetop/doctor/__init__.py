"""`treetop doctor`: what runs on this machine, what a configuration holds, and whether the guards are alive."""
