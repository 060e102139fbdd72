/* What programs that check collectives share.
 *
 * What rank r gives as its i-th value is value(r, i), so everybody knows what must come; whoever finds a difference ends
 * the job.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 3, MOST = 4096 };
enum { BLOCKING, STARTED, PERSISTENT, NUM_FORMS };

static int round_number, world_rank;
static long checked;

static inline long value(int rank, int i) { return 1000L * round_number + 37L * rank + 5L * i + 1; }

static inline void expect(long found, long expected, const char *what, int rank, int i) {
    checked += found;
    if (found == expected) return;
    fprintf(stderr, "%s: from rank %d, on rank %d of the world, value %d: %ld, expected %ld\n", what, rank,
            world_rank, i, found, expected);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Runs one collective in the form that is asked for. A persistent one is started `starts` times. */
#define RUN(Name, Iname, ...)                                              \
    do {                                                                   \
        MPI_Request request;                                               \
        if (form == BLOCKING) {                                            \
            MPI_##Name(__VA_ARGS__, comm);                                 \
        } else if (form == STARTED) {                                      \
            MPI_##Iname(__VA_ARGS__, comm, &request);                      \
            MPI_Wait(&request, MPI_STATUS_IGNORE);                         \
        } else {                                                           \
            MPI_##Name##_init(__VA_ARGS__, comm, MPI_INFO_NULL, &request); \
            for (int start = 0; start < starts; start++) {                 \
                MPI_Start(&request);                                       \
                MPI_Wait(&request, MPI_STATUS_IGNORE);                     \
            }                                                              \
            MPI_Request_free(&request);                                    \
        }                                                                  \
    } while (0)

/* How values stand in a buffer: `per` to an element, every `gap`-th long, elements `stride` longs apart. */
typedef struct {
    MPI_Datatype type;
    int per, gap, stride;
} Layout;

static inline int place(const Layout *layout, int i) {
    return i / layout->per * layout->stride + i % layout->per * layout->gap;
}

static inline void fill(long *buffer, const Layout *layout, int at, int count, int rank, int from) {
    for (int i = 0; i < count * layout->per; i++) buffer[place(layout, at * layout->per + i)] = value(rank, from + i);
}

static inline void check(const long *buffer, const Layout *layout, int at, int count, int rank, int from,
                         const char *what) {
    for (int i = 0; i < count * layout->per; i++)
        expect(buffer[place(layout, at * layout->per + i)], value(rank, from + i), what, rank, i);
}

static inline void clear(long *one, long *two) {
    memset(one, -1, MOST * sizeof *one);
    memset(two, -1, MOST * sizeof *two);
}

/* Affine maps x -> a x + b: their composition is associative and keeps the order. */
static inline void compose(void *in, void *inout, int *count, MPI_Datatype *type) {
    (void)type;
    const long *first = in, prime = 1000003;
    for (int i = 0; i < *count; i++) {
        long *second = (long *)inout + 2 * i, a = first[2 * i], b = first[2 * i + 1];
        long c = second[0], d = second[1];
        second[0] = a * c % prime;
        second[1] = (a * d + b) % prime;
    }
}

static inline void fill_pairs(long *buffer, int rank, int count) {
    for (int i = 0; i < 2 * count; i++) buffer[i] = value(rank, i);
}
