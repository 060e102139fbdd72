// A program of MPI's C++ bindings, which MPI-3 removed and Debian still builds: `bindings STEPS PAUSE_US`.
#include <mpi.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../c/gate.h"

static int num_copied, num_told;

static void check(bool holds, const char *what) {
    if (holds) return;
    std::fprintf(stderr, "%s does not hold on rank %d\n", what, MPI::COMM_WORLD.Get_rank());
    MPI::COMM_WORLD.Abort(3);
}

// Not commutative: pairs (a, b) are maps x -> a x + b, modulo a prime.
static void compose(const void *in, void *inout, int len, const MPI::Datatype &type) {
    check(type == MPI::LONG, "the datatype of an operation");
    const long *first = static_cast<const long *>(in);
    long *then = static_cast<long *>(inout);
    for (int i = 0; i + 1 < len; i += 2) {
        then[i + 1] = (then[i] * first[i + 1] + then[i + 1]) % 1000003;
        then[i] = then[i] * first[i] % 1000003;
    }
}

#ifdef MPICH
static int copy(const MPI::Comm &, int, void *, void *value, void *copied, bool &flag) {
    num_copied++;
    *static_cast<void **>(copied) = value;
    flag = true;
    return MPI::SUCCESS;
}

static void tell(MPI::Comm &, int *code, ...) {
    check(MPI::Get_error_class(*code) == MPI::ERR_RANK, "the error that a handler is told");
    num_told++;
}
#endif

static void run(char **argv) {
    MPI::Intracomm world = MPI::COMM_WORLD;
    const int rank = world.Get_rank(), size = world.Get_size(), steps = std::atoi(argv[1]);
    MPI::Op op;
    op.Init(compose, false);
    world.Set_errhandler(MPI::ERRORS_THROW_EXCEPTIONS);
#ifdef MPICH
    int keyval = MPI::Comm::Create_keyval(copy, MPI::Comm::NULL_DELETE_FN, nullptr);
    MPI::Errhandler handler = MPI::Comm::Create_errhandler(tell);
#endif
    std::vector<long> maps(1000), composed(1000);
    long answer = 0;
    for (int step = 0; step < steps; step++) {
        if (rank == 0 && step == steps - 1) wait_at_gate();
        for (int i = 0; i < 1000; i++) maps[i] = (answer + 7 * i + 31 * rank + step) % 1000003;
        world.Allreduce(maps.data(), composed.data(), 1000, MPI::LONG, op);
        for (long value : composed) answer = (answer * 131 + value) % 1000000007;
        long got = -1;
        MPI::Status status;
        MPI::Request request = world.Isend(&answer, 1, MPI::LONG, (rank + 1) % size, step);
        world.Recv(&got, 1, MPI::LONG, (rank + size - 1) % size, step, status);
        request.Wait();
        check(got == answer && status.Get_tag() == step, "what the neighbour sent");
        int error = MPI::SUCCESS;
        try {
            world.Send(&answer, 1, MPI::LONG, size, 0);
#ifndef MPICH
            // Debian's Open MPI is built without exceptions: this is what its library does in their place.
            error = MPI::mpi_errno;
#endif
        } catch (MPI::Exception &thrown) {
            error = thrown.Get_error_code();
        }
        check(MPI::Get_error_class(error) == MPI::ERR_RANK, "an exception for a rank that is not there");
        MPI::Intracomm half = world.Split(rank % 2, rank);
#ifdef MPICH
        half.Set_attr(keyval, &answer);
        MPI::Intracomm twin = half.Dup();
        void *found = nullptr;
        check(twin.Get_attr(keyval, &found) && found == &answer && num_copied == step + 1, "an attribute that is copied");
        twin.Set_errhandler(handler);
        twin.Send(&answer, 1, MPI::LONG, size, 0);
        check(num_told == step + 1, "an error handler that is called");
        twin.Free();
#endif
        half.Free();
        usleep(std::atoi(argv[2]));
    }
    op.Free();
    if (rank == 0) std::printf("answer %ld\n", answer);
}

int main(int argc, char **argv) {
    MPI::Init(argc, argv);
    try {
        run(argv);
    } catch (MPI::Exception &error) {
        std::fprintf(stderr, "not expected: %s\n", error.Get_error_string());
        MPI::COMM_WORLD.Abort(4);
    }
    MPI::Finalize();
}
