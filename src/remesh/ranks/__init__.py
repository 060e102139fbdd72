"""Ranks and their hosts, whatever their programs speak: who is where, how to call a leader, rooms, outputs, images."""
