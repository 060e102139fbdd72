"""Communication between ranks and processes: gathers, agreement, messages; process groups shed and grown again."""
