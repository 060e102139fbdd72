"""The consistent cut: how all ranks of a job stop at one moment, and who leads them. It knows neither MPI nor torch."""
