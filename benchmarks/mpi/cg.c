/* Conjugate gradients on a box of SIDE^3 points for each rank, as HPCG has them: how long do STEPS take? "worked seconds".

       cg SIDE STEPS     boxes lie in a row; a step is one product with neighbours' faces, and two sums over all */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int rank, size, side;
static size_t face, inside;

static double sum_over_all(const double *a, const double *b)
{
    double own = 0, sum;
    for (size_t at = face; at < face + inside; at++)
        own += a[at] * b[at];
    MPI_Allreduce(&own, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return sum;
}

/* The faces below and above the box, from those who have them. */
static void exchange(double *a)
{
    int below = rank ? rank - 1 : MPI_PROC_NULL, above = rank < size - 1 ? rank + 1 : MPI_PROC_NULL;
    int count = (int)face;
    MPI_Request open[4];
    MPI_Irecv(a, count, MPI_DOUBLE, below, 0, MPI_COMM_WORLD, open);
    MPI_Irecv(a + face + inside, count, MPI_DOUBLE, above, 1, MPI_COMM_WORLD, open + 1);
    MPI_Isend(a + inside, count, MPI_DOUBLE, above, 0, MPI_COMM_WORLD, open + 2);
    MPI_Isend(a + face, count, MPI_DOUBLE, below, 1, MPI_COMM_WORLD, open + 3);
    MPI_Waitall(4, open, MPI_STATUSES_IGNORE);
}

static void multiply(double *a, double *result)
{
    exchange(a);
    for (int z = 1; z <= side; z++)
        for (int y = 0; y < side; y++) {
            size_t row = (size_t)z * face + (size_t)y * side;
            for (int x = 0; x < side; x++) {
                size_t at = row + x;
                double sum = 6.5 * a[at] - a[at - face] - a[at + face];
                sum -= (x ? a[at - 1] : 0) + (x < side - 1 ? a[at + 1] : 0);
                sum -= (y ? a[at - side] : 0) + (y < side - 1 ? a[at + side] : 0);
                result[at] = sum;
            }
        }
}

int main(int count, char **arguments)
{
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    side = count > 1 ? atoi(arguments[1]) : 64;
    int steps = count > 2 ? atoi(arguments[2]) : 100;
    face = (size_t)side * side;
    inside = face * side;
    double *vector[4]; /* solution, rest, direction, product; each with the neighbours' faces */
    for (int which = 0; which < 4; which++)
        vector[which] = calloc(inside + 2 * face, sizeof **vector);
    double *solution = vector[0], *rest = vector[1], *direction = vector[2], *product = vector[3];
    for (size_t at = face; at < face + inside; at++)
        rest[at] = direction[at] = 1 + (double)(at % 7) / 7;
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime(), square = sum_over_all(rest, rest);
    for (int step = 0; step < steps; step++) {
        multiply(direction, product);
        double length = square / sum_over_all(direction, product);
        for (size_t at = face; at < face + inside; at++) {
            solution[at] += length * direction[at];
            rest[at] -= length * product[at];
        }
        double next = sum_over_all(rest, rest), share = square > 0 ? next / square : 0;
        for (size_t at = face; at < face + inside; at++)
            direction[at] = rest[at] + share * direction[at];
        square = next;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        printf("worked %.9g\nrest %.17g\n", MPI_Wtime() - start, square);
    MPI_Finalize();
    return 0;
}
