"""Ranks and their hosts, whatever their programs speak: seats, addresses of the leader, rooms, outputs, images."""
