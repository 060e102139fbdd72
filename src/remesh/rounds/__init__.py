"""The consistent cut: how all ranks of a job stop at one moment, and who leads them. Knows neither MPI nor torch."""
