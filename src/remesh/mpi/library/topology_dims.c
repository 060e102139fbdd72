/* MPI_Dims_create: how are ranks laid out in a grid that is as even as can be? */
#include "core.h"

/* Writes `num` factors of a number, descending: the largest as small as can be, then the next, and so on. */
static bool find_factors(int number, int num, int most, int *factors) {
    if (num == 0) return number == 1;
    for (int first = 1; first <= number && first <= most; first++) {
        double power = 1;
        for (int i = 0; i < num && power < number; i++) power *= first;
        if (number % first || power < number) continue;
        factors[0] = first;
        if (find_factors(number / first, num - 1, first, factors + 1)) return true;
    }
    return false;
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
    int *factors = NEW_ARRAY(int, num_free), used = 0;
    find_factors(left, num_free, left, factors);
    for (int d = 0; d < ndims; d++)
        if (!dims[d]) dims[d] = factors[used++];
    free(factors);
    return MPI_SUCCESS;
}
