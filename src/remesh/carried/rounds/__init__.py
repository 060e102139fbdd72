"""Consistent cut of a job: how all ranks stop at one moment, and who leads them. It knows neither MPI nor torch."""
