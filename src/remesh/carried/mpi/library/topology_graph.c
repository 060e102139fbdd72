/* Graphs: neighbours that a program names, for all ranks (graph) or each for some (distributed graph). */
#include "exchange.h"
#include "topology.h"

/* ---- Graphs that all ranks know ---- */

static int check_graph(const Comm *comm, int nnodes, const int index[], const int edges[]) {
    if (comm->remote) return fail(MPI_ERR_COMM, "comm is an intercommunicator, expected one of a single group");
    if (nnodes < 0 || nnodes > comm->size)
        return fail(MPI_ERR_ARG, "nnodes is %d, expected 0 to %d, the size of the communicator", nnodes, comm->size);
    for (int node = 0; node < nnodes; node++) {
        int first = node ? index[node - 1] : 0;
        if (index[node] < first)
            return fail(MPI_ERR_ARG, "index[%d] is %d, expected at least %d", node, index[node], first);
        for (int edge = first; edge < index[node]; edge++)
            if (edges[edge] < 0 || edges[edge] >= nnodes)
                return fail(MPI_ERR_ARG, "edges[%d] is %d, expected 0 to %d", edge, edges[edge], nnodes - 1);
    }
    return MPI_SUCCESS;
}

static int first_edge(const Topology *graph, int node) {
    return node ? graph->index[node - 1] : 0;
}

int do_Graph_create(Comm *comm_old, int nnodes, const int index[], const int edges[], int reorder, Comm **comm_graph) {
    (void)reorder;
    TRY(check_graph(comm_old, nnodes, index, edges));
    Topology *graph = make_topology(MPI_GRAPH);
    graph->num_nodes = nnodes;
    graph->index = copy_numbers(nnodes, index);
    graph->edges = copy_numbers(nnodes ? index[nnodes - 1] : 0, edges);
    if (comm_old->rank < nnodes) {
        int first = first_edge(graph, comm_old->rank), count = index[comm_old->rank] - first;
        graph->sources = (Neighbours){count, copy_numbers(count, edges + first), NULL};
        graph->destinations = (Neighbours){count, copy_numbers(count, edges + first), NULL};
    }
    return make_with_topology(comm_old, nnodes, graph, comm_graph);
}

int do_Graph_map(Comm *comm, int nnodes, const int index[], const int edges[], int *newrank) {
    TRY(check_graph(comm, nnodes, index, edges));
    *newrank = comm->rank < nnodes ? comm->rank : MPI_UNDEFINED;
    return MPI_SUCCESS;
}

int do_Graphdims_get(Comm *comm, int *nnodes, int *nedges) {
    Topology *graph;
    TRY(expect_topology(comm, MPI_GRAPH, &graph));
    *nnodes = graph->num_nodes;
    *nedges = first_edge(graph, graph->num_nodes);
    return MPI_SUCCESS;
}

static void copy_at_most(int most, int *to, int count, const int *from) {
    for (int i = 0; i < count && i < most; i++) to[i] = from[i];
}

int do_Graph_get(Comm *comm, int maxindex, int maxedges, int index[], int edges[]) {
    Topology *graph;
    TRY(expect_topology(comm, MPI_GRAPH, &graph));
    copy_at_most(maxindex, index, graph->num_nodes, graph->index);
    copy_at_most(maxedges, edges, first_edge(graph, graph->num_nodes), graph->edges);
    return MPI_SUCCESS;
}

int do_Graph_neighbors_count(Comm *comm, int rank, int *nneighbors) {
    Topology *graph;
    TRY(expect_topology(comm, MPI_GRAPH, &graph));
    if (rank < 0 || rank >= comm->size) return fail(MPI_ERR_RANK, "rank is %d of a graph of %d", rank, comm->size);
    *nneighbors = graph->index[rank] - first_edge(graph, rank);
    return MPI_SUCCESS;
}

int do_Graph_neighbors(Comm *comm, int rank, int maxneighbors, int neighbors[]) {
    int count;
    TRY(do_Graph_neighbors_count(comm, rank, &count));
    copy_at_most(maxneighbors, neighbors, count, comm->topology->edges + first_edge(comm->topology, rank));
    return MPI_SUCCESS;
}

/* ---- Graphs of which every rank knows its own edges ---- */

static bool is_weighted(const int weights[]) {
    return weights != MPI_UNWEIGHTED;
}

static int check_ranks(const Comm *comm, const char *what, int count, const int ranks[]) {
    for (int i = 0; i < count; i++)
        if (ranks[i] < 0 || ranks[i] >= comm->size)
            return fail(MPI_ERR_RANK, "%s[%d] is %d, expected 0 to %d", what, i, ranks[i], comm->size - 1);
    return MPI_SUCCESS;
}

static Neighbours named(int count, const int ranks[], const int weights[]) {
    return (Neighbours){count, copy_numbers(count, ranks), is_weighted(weights) ? copy_numbers(count, weights) : NULL};
}

int do_Dist_graph_create_adjacent(Comm *comm_old, int indegree, const int sources[], const int sourceweights[],
                                  int outdegree, const int destinations[], const int destweights[], Info *info,
                                  int reorder, Comm **comm_dist_graph) {
    (void)info, (void)reorder;
    if (comm_old->remote) return fail(MPI_ERR_COMM, "comm_old is an intercommunicator");
    if (indegree < 0 || outdegree < 0)
        return fail(MPI_ERR_ARG, "degrees are %d and %d, expected 0 or more", indegree, outdegree);
    TRY(check_ranks(comm_old, "sources", indegree, sources));
    TRY(check_ranks(comm_old, "destinations", outdegree, destinations));
    Topology *graph = make_topology(MPI_DIST_GRAPH);
    graph->sources = named(indegree, sources, sourceweights);
    graph->destinations = named(outdegree, destinations, destweights);
    return make_with_topology(comm_old, comm_old->size, graph, comm_dist_graph);
}

typedef struct {
    int source, destination, weight;
} Edge;

/* Those of all edges that end (or begin) at a rank, in the order in which ranks have named them. */
static Neighbours edges_at(const Edge *edges, int64_t count, int rank, bool is_source, bool weighted) {
    Neighbours found = {0, NEW_ARRAY(int, count), weighted ? NEW_ARRAY(int, count) : NULL};
    for (int64_t i = 0; i < count; i++) {
        if ((is_source ? edges[i].destination : edges[i].source) != rank) continue;
        if (weighted) found.weights[found.count] = edges[i].weight;
        found.ranks[found.count++] = is_source ? edges[i].source : edges[i].destination;
    }
    return found;
}

/* The edges that all ranks name, in order of ranks; the caller frees them. */
static int gather_edges(Comm *comm, const Edge *mine, int64_t count, Edge **all, int64_t *num_all) {
    int64_t *sizes = NEW_ARRAY(int64_t, comm->size), num_bytes = (int64_t)sizeof *mine * count, sum = 0;
    int error = gather_all(comm, &num_bytes, sizeof num_bytes, sizes);
    for (int rank = 0; rank < comm->size; rank++) sum += sizes[rank];
    *num_all = sum / (int64_t)sizeof *mine;
    *all = NEW_ARRAY(Edge, *num_all);
    if (!error) error = gather_unevenly(comm, (Bytes){mine, num_bytes}, sizes, *all);
    free(sizes);
    return error;
}

int do_Dist_graph_create(Comm *comm_old, int n, const int sources[], const int degrees[], const int destinations[],
                         const int weights[], Info *info, int reorder, Comm **comm_dist_graph) {
    (void)info, (void)reorder;
    if (comm_old->remote) return fail(MPI_ERR_COMM, "comm_old is an intercommunicator");
    int64_t count = 0, num_all;
    bool weighted = is_weighted(weights);
    int error = check_ranks(comm_old, "sources", n, sources);
    for (int i = 0; i < n && !error; i++) {
        if (degrees[i] < 0) error = fail(MPI_ERR_ARG, "degrees[%d] is %d, expected 0 or more", i, degrees[i]);
        else error = check_ranks(comm_old, "destinations", degrees[i], destinations + count), count += degrees[i];
    }
    /* Others are about to wait for our edges: all raise alike. */
    TRY(agree(comm_old, error));
    Edge *mine = NEW_ARRAY(Edge, count), *all;
    for (int64_t i = 0, edge = 0; i < n; i++)
        for (int each = 0; each < degrees[i]; each++, edge++)
            mine[edge] = (Edge){sources[i], destinations[edge], weighted ? weights[edge] : 1};
    error = gather_edges(comm_old, mine, count, &all, &num_all);
    if (!error) {
        Topology *graph = make_topology(MPI_DIST_GRAPH);
        graph->sources = edges_at(all, num_all, comm_old->rank, true, weighted);
        graph->destinations = edges_at(all, num_all, comm_old->rank, false, weighted);
        error = make_with_topology(comm_old, comm_old->size, graph, comm_dist_graph);
    }
    free(all);
    free(mine);
    return error;
}

int do_Dist_graph_neighbors_count(Comm *comm, int *indegree, int *outdegree, int *weighted) {
    Topology *graph;
    TRY(expect_topology(comm, MPI_DIST_GRAPH, &graph));
    *indegree = graph->sources.count;
    *outdegree = graph->destinations.count;
    *weighted = graph->sources.weights || graph->destinations.weights;
    return MPI_SUCCESS;
}

static void tell(const Neighbours *neighbours, int most, int ranks[], int weights[]) {
    copy_at_most(most, ranks, neighbours->count, neighbours->ranks);
    if (neighbours->weights && is_weighted(weights) && weights != MPI_WEIGHTS_EMPTY)
        copy_at_most(most, weights, neighbours->count, neighbours->weights);
}

int do_Dist_graph_neighbors(Comm *comm, int maxindegree, int sources[], int sourceweights[], int maxoutdegree,
                            int destinations[], int destweights[]) {
    Topology *graph;
    TRY(expect_topology(comm, MPI_DIST_GRAPH, &graph));
    tell(&graph->sources, maxindegree, sources, sourceweights);
    tell(&graph->destinations, maxoutdegree, destinations, destweights);
    return MPI_SUCCESS;
}
