/* Grids: who is where, and whom does a shift reach? Source: MPI 4.1, section 8.5. */
#include "topology.h"

static int check_grid(const Comm *comm, int ndims, const int dims[], int64_t *num_ranks) {
    if (comm->remote) return fail(MPI_ERR_COMM, "comm is an intercommunicator, expected one of a single group");
    if (ndims < 0) return fail(MPI_ERR_DIMS, "ndims is %d, expected 0 or more", ndims);
    *num_ranks = 1;
    for (int d = 0; d < ndims; d++) {
        if (dims[d] <= 0) return fail(MPI_ERR_DIMS, "dims[%d] is %d, expected 1 or more", d, dims[d]);
        *num_ranks *= dims[d];
        if (*num_ranks > comm->size)
            return fail(MPI_ERR_TOPOLOGY, "the grid has more ranks than the communicator: it has %d", comm->size);
    }
    return MPI_SUCCESS;
}

static void coords_of(const Topology *grid, int rank, int *coords) {
    for (int d = grid->num_dims - 1; d >= 0; d--) {
        coords[d] = rank % grid->dims[d];
        rank /= grid->dims[d];
    }
}

/* Who is there, `step` further in one dimension; MPI_PROC_NULL beyond a border that is not periodic. */
static int rank_at(const Topology *grid, const int *coords, int direction, int step) {
    int64_t rank = 0;
    for (int d = 0; d < grid->num_dims; d++) {
        int64_t size = grid->dims[d], at = (int64_t)coords[d] + (d == direction ? step : 0);
        if (at < 0 || at >= size) {
            if (!grid->periods[d]) return MPI_PROC_NULL;
            at = (at % size + size) % size;
        }
        rank = rank * size + at;
    }
    return (int)rank;
}

/* The neighbours of a rank: for each dimension the lower one, then the upper one. */
static void find_neighbours(Topology *grid) {
    int count = 2 * grid->num_dims, *ranks = NEW_ARRAY(int, count);
    for (int i = 0; i < count; i++) ranks[i] = rank_at(grid, grid->coords, i / 2, i % 2 ? 1 : -1);
    grid->sources = (Neighbours){count, ranks, NULL};
    grid->destinations = (Neighbours){count, copy_numbers(count, ranks), NULL};
}

static Topology *make_grid(int ndims, const int dims[], const int periods[], int rank) {
    Topology *grid = make_topology(MPI_CART);
    grid->num_dims = ndims;
    grid->dims = copy_numbers(ndims, dims);
    grid->periods = copy_numbers(ndims, periods);
    for (int d = 0; d < ndims; d++) grid->periods[d] = periods[d] != 0;
    grid->coords = NEW_ARRAY(int, ndims);
    coords_of(grid, rank, grid->coords);
    find_neighbours(grid);
    return grid;
}

int do_Cart_create(Comm *comm_old, int ndims, const int dims[], const int periods[], int reorder, Comm **comm_cart) {
    (void)reorder; /* ranks stay where they are: they may be elsewhere after a restart */
    int64_t num_ranks;
    TRY(check_grid(comm_old, ndims, dims, &num_ranks));
    Topology *grid = make_grid(ndims, dims, periods, comm_old->rank);
    return make_with_topology(comm_old, (int)num_ranks, grid, comm_cart);
}

int do_Cart_map(Comm *comm, int ndims, const int dims[], const int periods[], int *newrank) {
    (void)periods;
    int64_t num_ranks;
    TRY(check_grid(comm, ndims, dims, &num_ranks));
    *newrank = comm->rank < num_ranks ? comm->rank : MPI_UNDEFINED;
    return MPI_SUCCESS;
}

int do_Cart_sub(Comm *comm, const int remain_dims[], Comm **newcomm) {
    enum { BY_SUB = 40 };
    Topology *grid;
    TRY(expect_topology(comm, MPI_CART, &grid));
    uint64_t number = next_number(comm, BY_SUB);
    int ndims = 0, num = 0, rank = 0, *kept = NEW_ARRAY(int, grid->num_dims), *periods = NEW_ARRAY(int, grid->num_dims);
    for (int d = 0; d < grid->num_dims; d++) {
        if (!remain_dims[d]) number = mix_numbers(number, (uint64_t)grid->coords[d]);
        else periods[ndims] = grid->periods[d], kept[ndims++] = grid->dims[d];
    }
    int *world = NEW_ARRAY(int, comm->size), *coords = NEW_ARRAY(int, grid->num_dims);
    for (int each = 0; each < comm->size; each++) {
        bool is_here = true;
        coords_of(grid, each, coords);
        for (int d = 0; d < grid->num_dims; d++) is_here = is_here && (remain_dims[d] || coords[d] == grid->coords[d]);
        if (each == comm->rank) rank = num;
        if (is_here) world[num++] = comm->world[each];
    }
    int error = make_comm(comm, number, num, world, newcomm);
    if (!error) (*newcomm)->topology = make_grid(ndims, kept, periods, rank);
    int *owned[] = {kept, periods, world, coords};
    for (int i = 0; i < 4; i++) free(owned[i]);
    return error;
}

int do_Cartdim_get(Comm *comm, int *ndims) {
    Topology *grid;
    TRY(expect_topology(comm, MPI_CART, &grid));
    *ndims = grid->num_dims;
    return MPI_SUCCESS;
}

int do_Cart_get(Comm *comm, int maxdims, int dims[], int periods[], int coords[]) {
    Topology *grid;
    TRY(expect_topology(comm, MPI_CART, &grid));
    if (maxdims < grid->num_dims)
        return fail(MPI_ERR_ARG, "maxdims is %d, and the grid has %d dimensions", maxdims, grid->num_dims);
    size_t num_bytes = sizeof(int) * (size_t)grid->num_dims;
    if (!num_bytes) return MPI_SUCCESS;
    memcpy(dims, grid->dims, num_bytes);
    memcpy(periods, grid->periods, num_bytes);
    memcpy(coords, grid->coords, num_bytes);
    return MPI_SUCCESS;
}

int do_Cart_rank(Comm *comm, const int coords[], int *rank) {
    Topology *grid;
    TRY(expect_topology(comm, MPI_CART, &grid));
    *rank = rank_at(grid, coords, 0, 0);
    if (*rank != MPI_PROC_NULL) return MPI_SUCCESS;
    for (int d = 0; d < grid->num_dims; d++)
        if (!grid->periods[d] && (coords[d] < 0 || coords[d] >= grid->dims[d]))
            return fail(MPI_ERR_ARG, "coords[%d] is %d, expected 0 to %d", d, coords[d], grid->dims[d] - 1);
    return MPI_SUCCESS;
}

int do_Cart_coords(Comm *comm, int rank, int maxdims, int coords[]) {
    Topology *grid;
    TRY(expect_topology(comm, MPI_CART, &grid));
    if (rank < 0 || rank >= comm->size) return fail(MPI_ERR_RANK, "rank is %d of a grid of %d", rank, comm->size);
    if (maxdims < grid->num_dims)
        return fail(MPI_ERR_ARG, "maxdims is %d, and the grid has %d dimensions", maxdims, grid->num_dims);
    coords_of(grid, rank, coords);
    return MPI_SUCCESS;
}

int do_Cart_shift(Comm *comm, int direction, int disp, int *rank_source, int *rank_dest) {
    Topology *grid;
    TRY(expect_topology(comm, MPI_CART, &grid));
    if (direction < 0 || direction >= grid->num_dims)
        return fail(MPI_ERR_DIMS, "direction is %d of %d dimensions", direction, grid->num_dims);
    *rank_source = rank_at(grid, grid->coords, direction, -disp);
    *rank_dest = rank_at(grid, grid->coords, direction, disp);
    return MPI_SUCCESS;
}
