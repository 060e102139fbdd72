/* p4est: a mesh of octrees that is refined, balanced and divided anew in each step: `forest STEPS`. */
#include <p4est_extended.h>
#include <p4est_ghost.h>
#include <p4est_nodes.h>
#include <p4est_lnodes.h>
#include <p4est_iterate.h>
#include <p4est_communication.h>
#include <sc_shmem.h>
#include <stdio.h>
#include <stdlib.h>

static int step;

static int refine(p4est_t *forest, p4est_topidx_t tree, p4est_quadrant_t *q) {
    (void)forest;
    return q->level < 6 && (q->x / 4096 + q->y / 8192 * 3 + tree + step) % 5 == 0;
}

static int coarsen(p4est_t *forest, p4est_topidx_t tree, p4est_quadrant_t *q[]) {
    (void)forest;
    return (q[0]->x / 4096 + tree + step) % 3 == 0;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    sc_init(MPI_COMM_WORLD, 1, 0, NULL, SC_LP_ESSENTIAL);
    sc_shmem_type_t kinds[] = {SC_SHMEM_BASIC, SC_SHMEM_PRESCAN, SC_SHMEM_WINDOW, SC_SHMEM_WINDOW_PRESCAN};
    sc_mpi_comm_attach_node_comms(MPI_COMM_WORLD, 0);
    p4est_init(NULL, SC_LP_ESSENTIAL);
    p4est_connectivity_t *shape = p4est_connectivity_new_moebius();
    p4est_t *forest = p4est_new_ext(MPI_COMM_WORLD, shape, 0, 2, 1, 0, NULL, NULL);
    unsigned long answer = 0;
    for (step = 0; step < atoi(argv[1]); step++) {
        sc_shmem_set_type(MPI_COMM_WORLD, kinds[step % 4]);
        p4est_coarsen(forest, 0, coarsen, NULL);
        p4est_refine(forest, 0, refine, NULL);
        p4est_balance(forest, P4EST_CONNECT_FULL, NULL);
        p4est_partition(forest, 0, NULL);
        p4est_ghost_t *ghost = p4est_ghost_new(forest, P4EST_CONNECT_FULL);
        p4est_lnodes_t *nodes = p4est_lnodes_new(forest, ghost, 2);
        answer = answer * 31 + p4est_checksum(forest) + (unsigned long)ghost->ghosts.elem_count + (unsigned long)nodes->num_local_nodes;
        p4est_gloidx_t *counts = sc_shmem_malloc(sc_package_id, sizeof *counts, (size_t)forest->mpisize, MPI_COMM_WORLD);
        p4est_gloidx_t own = forest->local_num_quadrants;
        sc_shmem_allgather(&own, sizeof own, MPI_BYTE, counts, sizeof own, MPI_BYTE, MPI_COMM_WORLD);
        for (int r = 0; r < forest->mpisize; r++) answer = answer * 31 + (unsigned long)counts[r];
        sc_shmem_free(sc_package_id, counts, MPI_COMM_WORLD);
        p4est_lnodes_destroy(nodes);
        p4est_ghost_destroy(ghost);
    }
    unsigned long all;
    MPI_Reduce(&answer, &all, 1, MPI_UNSIGNED_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (forest->mpirank == 0) printf("answer %lu %ld\n", all, (long)forest->global_num_quadrants);
    p4est_destroy(forest);
    p4est_connectivity_destroy(shape);
    sc_finalize();
    MPI_Finalize();
}
