"""Training whose ranks are killed, stopped, added and removed, with checks that nothing is lost."""
