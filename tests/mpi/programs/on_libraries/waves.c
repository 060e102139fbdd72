/* FFTW over MPI: transforms of three dims there and back, with transposes between ranks: `waves STEPS`. */
#include <fftw3-mpi.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    fftw_mpi_init();
    const ptrdiff_t n = 24;
    ptrdiff_t local, start, local_t, start_t;
    ptrdiff_t num = fftw_mpi_local_size_3d_transposed(n, n, n, MPI_COMM_WORLD, &local, &start, &local_t, &start_t);
    fftw_complex *data = fftw_alloc_complex(num);
    fftw_plan there = fftw_mpi_plan_dft_3d(n, n, n, data, data, MPI_COMM_WORLD, FFTW_FORWARD, FFTW_ESTIMATE | FFTW_MPI_TRANSPOSED_OUT);
    fftw_plan back = fftw_mpi_plan_dft_3d(n, n, n, data, data, MPI_COMM_WORLD, FFTW_BACKWARD, FFTW_ESTIMATE | FFTW_MPI_TRANSPOSED_IN);
    for (ptrdiff_t i = 0; i < local * n * n; i++) data[i][0] = (double)((start * n * n + i) * 7919 % 1009), data[i][1] = i % 3;
    double total = 0;
    for (int step = 0; step < atoi(argv[1]); step++) {
        fftw_execute(there);
        for (ptrdiff_t i = 0; i < local_t * n * n; i++) data[i][0] /= (double)(n * n * n), data[i][1] /= -(double)(n * n * n);
        fftw_execute(back);
        double sum = 0, all;
        for (ptrdiff_t i = 0; i < local * n * n; i++) sum += data[i][0] * (double)(i % 11) + data[i][1];
        MPI_Allreduce(&sum, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        total = total * 0.5 + all;
    }
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank == 0) printf("answer %.17g\n", total);
    fftw_mpi_cleanup();
    MPI_Finalize();
}
