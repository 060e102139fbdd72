/* A gas in a box of SIDE^3 cells for each rank, in steps whose length all agree on, as LULESH has them: how long do STEPS
   take? "worked seconds".

       hydro SIDE STEPS     boxes lie in a row; a step exchanges five fields with both neighbours, and finds the least */

#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { FIELDS = 5 }; /* density, momentum in three dims, energy */

static int rank, size, side;
static size_t face, cells;

static void exchange(double *field[])
{
    int below = rank ? rank - 1 : MPI_PROC_NULL, above = rank < size - 1 ? rank + 1 : MPI_PROC_NULL;
    int count = (int)face;
    MPI_Request open[4 * FIELDS];
    for (int which = 0; which < FIELDS; which++) {
        double *own = field[which];
        MPI_Request *next = open + 4 * which;
        MPI_Irecv(own, count, MPI_DOUBLE, below, which, MPI_COMM_WORLD, next);
        MPI_Irecv(own + face + cells, count, MPI_DOUBLE, above, which, MPI_COMM_WORLD, next + 1);
        MPI_Isend(own + cells, count, MPI_DOUBLE, above, which, MPI_COMM_WORLD, next + 2);
        MPI_Isend(own + face, count, MPI_DOUBLE, below, which, MPI_COMM_WORLD, next + 3);
    }
    MPI_Waitall(4 * FIELDS, open, MPI_STATUSES_IGNORE);
}

/* The longest step that no wave outruns. */
static double choose_step(double *field[])
{
    double own = 1, least;
    for (size_t at = face; at < face + cells; at++) {
        double density = field[0][at], speed = 0;
        for (int dim = 1; dim <= 3; dim++)
            speed = fmax(speed, fabs(field[dim][at] / density));
        own = fmin(own, 0.2 / (speed + sqrt(1.4 * fabs(field[4][at]) / density) + 1e-9));
    }
    MPI_Allreduce(&own, &least, 1, MPI_DOUBLE, MPI_MIN, MPI_COMM_WORLD);
    return least;
}

/* Each cell goes towards its neighbours in each dim, faster where pressure differs. */
static void advance(double *field[], double *fresh[], double step)
{
    for (size_t at = face; at < face + cells; at++) {
        size_t x = at % side, y = at / side % side;
        size_t near[6] = {at - face, at + face, x ? at - 1 : at, x < (size_t)side - 1 ? at + 1 : at,
                          y ? at - side : at, y < (size_t)side - 1 ? at + side : at};
        for (int which = 0; which < FIELDS; which++) {
            double around = 0;
            for (int other = 0; other < 6; other++)
                around += field[which][near[other]];
            fresh[which][at] = field[which][at] + step * (around / 6 - field[which][at]);
        }
        for (int dim = 0; dim < 3; dim++)
            fresh[dim + 1][at] -= step * 0.2 * (field[4][near[2 * dim + 1]] - field[4][near[2 * dim]]);
    }
}

int main(int count, char **arguments)
{
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    side = count > 1 ? atoi(arguments[1]) : 45;
    int steps = count > 2 ? atoi(arguments[2]) : 100;
    face = (size_t)side * side;
    cells = face * side;
    double *field[FIELDS], *fresh[FIELDS];
    for (int which = 0; which < FIELDS; which++) {
        field[which] = malloc((cells + 2 * face) * sizeof(double));
        fresh[which] = malloc((cells + 2 * face) * sizeof(double));
        for (size_t at = 0; at < cells + 2 * face; at++)
            field[which][at] = fresh[which][at] = which == 0 || which == 4 ? 1 + (double)(at % 11) / 11 : 0;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime(), passed = 0;
    for (int number = 0; number < steps; number++) {
        exchange(field);
        double step = choose_step(field);
        advance(field, fresh, step);
        for (int which = 0; which < FIELDS; which++) {
            double *old = field[which];
            field[which] = fresh[which];
            fresh[which] = old;
        }
        passed += step;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        printf("worked %.9g\npassed %.17g\n", MPI_Wtime() - start, passed);
    MPI_Finalize();
    return 0;
}
