/* What communicators and topologies are, and what they refuse. Rank 0 prints `answer` if all is as it should be. */
#include "checking.h"

static int num_copied, num_deleted;

static int copy(MPI_Comm comm, int key, void *extra, void *value, void *copied, int *flag) {
    (void)comm, (void)key, (void)extra;
    num_copied++;
    *(void **)copied = value;
    *flag = 1;
    return MPI_SUCCESS;
}

static int delete(MPI_Comm comm, int key, void *value, void *extra) {
    (void)comm, (void)key, (void)value, (void)extra;
    num_deleted++;
    return MPI_SUCCESS;
}

static void duplicates(void) {
    int key, found, length;
    char text[MPI_MAX_OBJECT_NAME];
    void *value;
    MPI_Comm twin;
    MPI_Request request;
    MPI_Info info, used;
    MPI_Comm_create_keyval(copy, delete, &key, NULL);
    MPI_Comm_set_attr(MPI_COMM_WORLD, key, &num_copied);
    MPI_Comm_idup(MPI_COMM_WORLD, &twin, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    expect(num_copied, 1, "attributes copied", 0, 0);
    MPI_Comm_get_attr(twin, key, &value, &found);
    expect(found && value == &num_copied, 1, "attribute of a duplicate", 0, 0);
    MPI_Comm_free(&twin);
    expect(num_deleted, 1, "attributes deleted", 0, 0);
    MPI_Comm_delete_attr(MPI_COMM_WORLD, key);
    MPI_Info_create(&info);
    MPI_Info_set(info, "colour", "green");
    MPI_Comm_dup_with_info(MPI_COMM_WORLD, info, &twin);
    MPI_Comm_get_info(twin, &used);
    MPI_Info_get(used, "colour", 9, text, &found);
    expect(found && !strcmp(text, "green"), 1, "info of a duplicate", 0, 0);
    MPI_Comm_set_name(twin, "twin");
    MPI_Comm_get_name(twin, text, &length);
    expect(length, 4, "length of a name", 0, 0);
    MPI_Info_free(&info);
    MPI_Info_free(&used);
    MPI_Comm_free(&twin);
    for (int i = 0; i < 1000; i++) {
        MPI_Comm_dup(MPI_COMM_WORLD, &twin);
        MPI_Comm_free(&twin);
    }
}

static void expect_error(int error, int expected, const char *what) {
    int class;
    MPI_Error_class(error, &class);
    expect(class, expected, what, 0, 0);
}

static void refusals(int size) {
    MPI_Comm comm;
    int number = 0, sides[2], error;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    expect_error(MPI_Bcast(&number, 1, MPI_INT, size, comm), MPI_ERR_ROOT, "a root that is none");
    expect_error(MPI_Bcast(&number, -1, MPI_INT, 0, comm), MPI_ERR_COUNT, "a negative count");
    error = MPI_Neighbor_allgather(&number, 1, MPI_INT, sides, 1, MPI_INT, comm);
    expect_error(error, MPI_ERR_TOPOLOGY, "no neighbours");
    expect_error(MPI_Cartdim_get(comm, &number), MPI_ERR_TOPOLOGY, "no grid");
    MPI_Comm none;
    expect_error(MPI_Comm_split(comm, -7, 0, &none), MPI_ERR_ARG, "a negative color");
    MPI_Comm_free(&comm);
}

static int num_told;
static void tell(MPI_Comm *comm, int *error, ...) {
    (void)comm;
    expect_error(*error, MPI_ERR_ROOT, "what a handler is told");
    num_told++;
}

/* A handler outlives the communicators that had it, and its own handle. */
static void handlers(int size) {
    MPI_Comm comm, twin;
    MPI_Errhandler handler, same;
    int number = 0;
    MPI_Comm_create_errhandler(tell, &handler);
    for (int i = 1; i <= 3; i++) {
        MPI_Comm_dup(MPI_COMM_WORLD, &comm);
        MPI_Comm_set_errhandler(comm, handler);
        MPI_Comm_dup(comm, &twin);
        MPI_Comm_free(&comm);
        MPI_Comm_get_errhandler(twin, &same);
        MPI_Errhandler_free(&same);
        if (i == 3) MPI_Errhandler_free(&handler);
        MPI_Bcast(&number, 1, MPI_INT, size, twin);
        expect(num_told, i, "calls of a handler", 0, i);
        MPI_Comm_free(&twin);
    }
}

/* A ring that all know, on a duplicate of its communicator. */
static void ring(int size) {
    int *ends = calloc(2 * size, sizeof *ends), *edges = calloc(2 * size, sizeof *edges), kind, nodes, num, got[2];
    MPI_Comm comm, twin;
    for (int r = 0; r < size; r++) {
        ends[r] = 2 * (r + 1);
        edges[2 * r] = (r + 1) % size;
        edges[2 * r + 1] = (r + size - 1) % size;
    }
    MPI_Graph_create(MPI_COMM_WORLD, size, ends, edges, 0, &comm);
    MPI_Comm_dup(comm, &twin);
    MPI_Comm_free(&comm);
    MPI_Topo_test(twin, &kind);
    expect(kind, MPI_GRAPH, "Topo_test", 0, 0);
    MPI_Graphdims_get(twin, &nodes, &num);
    expect(nodes, size, "nodes", 0, 0);
    expect(num, 2 * size, "edges", 0, 0);
    MPI_Neighbor_allgather(&world_rank, 1, MPI_INT, got, 1, MPI_INT, twin);
    for (int i = 0; i < 2; i++) expect(got[i], edges[2 * world_rank + i], "Neighbor_allgather on a graph", 0, i);
    MPI_Comm_free(&twin);
    free(edges);
    free(ends);
}

static void sizes_of_grids(void) {
    for (int n = 1; n <= 60; n++) {
        int dims[3] = {0, 0, 0};
        MPI_Dims_create(n, 3, dims);
        expect(dims[0] * dims[1] * dims[2], n, "Dims_create", 0, 0);
        expect(dims[0] >= dims[1] && dims[1] >= dims[2], 1, "Dims_create: order", 0, 0);
    }
    int cube[3] = {0, 0, 0}, given[2] = {0, 3};
    /* The least difference of sides; of those that are equal in that, the one with the longest short sides. */
    static const int even[][4] = {{5040, 21, 16, 15}, {7488, 26, 18, 16}, {19008, 33, 24, 24}};
    for (int i = 0; i < 3; i++) {
        int sides[3] = {0};
        MPI_Dims_create(even[i][0], 3, sides);
        for (int d = 0; d < 3; d++) expect(sides[d], even[i][d + 1], "Dims_create of even sides", d, even[i][0]);
    }
    MPI_Dims_create(64, 3, cube);
    expect(cube[0], 4, "Dims_create of a cube", 0, 0);
    MPI_Dims_create(12, 2, given);
    expect(given[0], 4, "Dims_create of what is left", 0, 0);
}

/* Two halves of the world, made known to each other without a communicator of both. */
static void halves(int size) {
    int half = size / 2, is_first = world_rank < half, num, sum, wanted = 0;
    int one[1][3] = {{0, half - 1, 1}}, two[1][3] = {{half, size - 1, 1}};
    MPI_Group world, first, second;
    MPI_Comm comm, part;
    if (size < 2) return;
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Group_range_incl(world, 1, one, &first);
    MPI_Group_range_incl(world, 1, two, &second);
    MPI_Intercomm_create_from_groups(is_first ? first : second, 0, is_first ? second : first, 0, "halves",
                                     MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &comm);
    MPI_Comm_remote_size(comm, &num);
    expect(num, is_first ? size - half : half, "Comm_remote_size", 0, 0);
    MPI_Allreduce(&world_rank, &sum, 1, MPI_INT, MPI_SUM, comm);
    for (int r = is_first ? half : 0; r < (is_first ? size : half); r++) wanted += r;
    expect(sum, wanted, "Allreduce between halves", 0, 0);
    int is_in = is_first || world_rank == half;
    MPI_Comm_split(comm, is_in ? 0 : MPI_UNDEFINED, 0, &part);
    expect(part != MPI_COMM_NULL, is_in, "Comm_split between halves", 0, 0);
    if (is_in) {
        MPI_Barrier(part);
        MPI_Comm_disconnect(&part);
    }
    MPI_Comm_free(&comm);
    MPI_Group_free(&first);
    MPI_Group_free(&second);
    MPI_Group_free(&world);
}

int main(int argc, char **argv) {
    int size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    duplicates();
    refusals(size);
    handlers(size);
    ring(size);
    sizes_of_grids();
    halves(size);
    if (world_rank == 0) printf("answer %ld\n", checked);
    MPI_Finalize();
    return 0;
}
