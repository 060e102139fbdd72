/* MPI_Dims_create: how are ranks laid out in a grid that is as even as can be? */
#include "core.h"

/* A choice of factors, ascending. Of those with the least difference between largest and smallest, the one with the
 * largest smallest factor, then the largest next, and so on, which is MPICH's choice, too.
 */
typedef struct {
    int num, difference; /* of the best one yet */
    int *tried, *best;
} Factors;

static bool is_power_within(int base, int exponent, int number) {
    for (; exponent > 0; exponent--) number /= base;
    return number > 0;
}

/* Try all ways to fill the places from `at` on with factors of `number` that are not smaller than `least`. */
static void try_factors(Factors *factors, int number, int at, int least) {
    if (at == factors->num - 1) {
        factors->tried[at] = number;
        int difference = number - factors->tried[0];
        if (difference > factors->difference) return;
        factors->difference = difference;
        memcpy(factors->best, factors->tried, (size_t)factors->num * sizeof(int));
        return;
    }
    for (int first = least; is_power_within(first, factors->num - at, number); first++) {
        if (number % first) continue;
        if (at > 0 && first - factors->tried[0] > factors->difference) return;
        factors->tried[at] = first;
        try_factors(factors, number / first, at + 1, first);
    }
}

int do_Dims_create(int nnodes, int ndims, int dims[]) {
    if (nnodes < 1) return fail(MPI_ERR_ARG, "nnodes is %d, expected 1 or more", nnodes);
    if (ndims < 0) return fail(MPI_ERR_DIMS, "ndims is %d, expected 0 or more", ndims);
    int left = nnodes, num_free = 0;
    for (int d = 0; d < ndims; d++) {
        if (dims[d] < 0) return fail(MPI_ERR_DIMS, "dims[%d] is %d, expected 0 or more", d, dims[d]);
        if (dims[d] && left % dims[d])
            return fail(MPI_ERR_DIMS, "%d ranks do not fill the grid: dims[%d] is %d", nnodes, d, dims[d]);
        if (dims[d]) left /= dims[d];
        else num_free++;
    }
    if (!num_free) {
        bool is_full = !ndims || left == 1;
        return is_full ? MPI_SUCCESS : fail(MPI_ERR_DIMS, "%d ranks are %d times what the grid has", nnodes, left);
    }
    Factors factors = {num_free, INT_MAX, NEW_ARRAY(int, num_free), NEW_ARRAY(int, num_free)};
    try_factors(&factors, left, 0, 1);
    for (int d = 0; d < ndims; d++)
        if (!dims[d]) dims[d] = factors.best[--num_free];
    free(factors.tried);
    free(factors.best);
    return MPI_SUCCESS;
}
