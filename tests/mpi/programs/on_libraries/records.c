/* PnetCDF: variables of one file written and read by all ranks, with strides, maps, and requests: `records STEPS`. */
#include <mpi.h>
#include <pnetcdf.h>
#include <stdio.h>
#include <stdlib.h>

static void check(int error) {
    if (error == NC_NOERR) return;
    fprintf(stderr, "%s\n", ncmpi_strerror(error));
    MPI_Abort(MPI_COMM_WORLD, 3);
}

int main(int argc, char **argv) {
    int rank, size, file, dims[3], fixed, record, steps = atoi(argv[1]);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Info hints;
    MPI_Info_create(&hints);
    MPI_Info_set(hints, "nc_header_align_size", "512");
    check(ncmpi_create(MPI_COMM_WORLD, "records.nc", NC_CLOBBER | NC_64BIT_DATA, hints, &file));
    check(ncmpi_def_dim(file, "time", NC_UNLIMITED, &dims[0]));
    check(ncmpi_def_dim(file, "y", 8 * size, &dims[1]));
    check(ncmpi_def_dim(file, "x", 30, &dims[2]));
    check(ncmpi_def_var(file, "record", NC_DOUBLE, 3, dims, &record));
    check(ncmpi_def_var(file, "fixed", NC_INT, 2, dims + 1, &fixed));
    check(ncmpi_put_att_text(file, NC_GLOBAL, "title", 7, "records"));
    check(ncmpi_enddef(file));
    unsigned long answer = 0;
    double values[8 * 30], got[8 * 30];
    int ints[4 * 30], column[8];
    for (int step = 0; step < steps; step++) {
        MPI_Offset start[3] = {step, 8 * rank, 0}, count[3] = {1, 8, 30}, stride[2] = {2, 1}, part[2] = {4, 30};
        for (int i = 0; i < 240; i++) values[i] = i * 0.5 + rank * 1000 + step;
        for (int i = 0; i < 120; i++) ints[i] = i + rank * 100 + step;
        check(ncmpi_put_vara_double_all(file, record, start, count, values));
        int requests[2], statuses[2];
        check(ncmpi_iput_vars_int(file, fixed, start + 1, part, stride, ints, &requests[0]));
        MPI_Offset next[3] = {step, (rank + 1) % size * 8, 0}, one[2] = {8, 1};
        check(ncmpi_iget_vara_double(file, record, next, count, got, &requests[1]));
        check(ncmpi_wait_all(file, 2, requests, statuses));
        check(statuses[0]), check(statuses[1]);
        check(ncmpi_sync(file));
        MPI_Barrier(MPI_COMM_WORLD);
        check(ncmpi_begin_indep_data(file));
        check(ncmpi_get_vara_int(file, fixed, next + 1, one, column));
        check(ncmpi_end_indep_data(file));
        for (int i = 0; i < 240; i++) answer = answer * 31 + (unsigned long)(got[i] * 2);
        for (int i = 0; i < 8; i += 2) answer = answer * 31 + (unsigned long)column[i];
    }
    check(ncmpi_close(file));
    MPI_Info_free(&hints);
    unsigned long all;
    MPI_Reduce(&answer, &all, 1, MPI_UNSIGNED_LONG, MPI_BXOR, 0, MPI_COMM_WORLD);
    if (rank == 0) printf("answer %lu\n", all);
    MPI_Finalize();
}
