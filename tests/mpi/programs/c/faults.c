/* Does what no program may do: `faults KIND`. What comes of it is the test's to say. */
#include <dlfcn.h>
#include <fcntl.h>
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *own_path;

static void use_after_end(void) {
    MPI_Finalize();
    MPI_Barrier(MPI_COMM_WORLD);
}

/* The status of a child that uses MPI; this process goes on well. */
static void use_in_child(void) {
    pid_t child = fork();
    if (!child) {
        MPI_Barrier(MPI_COMM_WORLD);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    printf("child %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

/* The child is another program. */
static void start_program(void) {
    char command[4096];
    snprintf(command, sizeof command, "%s plain", own_path);
    int status = system(command);
    printf("child %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

static void on_alarm(int number) {
    (void)number;
    MPI_Barrier(MPI_COMM_SELF);
    MPI_Barrier(MPI_COMM_WORLD);
}

static void use_in_handler(void) {
    signal(SIGALRM, on_alarm);
    alarm(1);
    int never;
    MPI_Recv(&never, 1, MPI_INT, MPI_ANY_SOURCE, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void spawn(void) {
    MPI_Comm made;
    MPI_Comm_spawn("other", MPI_ARGV_NULL, 1, MPI_INFO_NULL, 0, MPI_COMM_WORLD, &made, MPI_ERRCODES_IGNORE);
}

/* A second MPI, as a library of others would bring it. */
static void mix_faces(void) {
    void *other = dlopen("libmpi.so.40", RTLD_NOW | RTLD_LOCAL);
    if (!other) {
        fprintf(stderr, "%s\n", dlerror());
        exit(9);
    }
    int (*init)(int *, char ***) = (int (*)(int *, char ***))dlsym(other, "MPI_Init");
    int (*barrier)(void *) = (int (*)(void *))dlsym(other, "MPI_Barrier");
    init(NULL, NULL);
    barrier(dlsym(other, "ompi_mpi_comm_world"));
}

/* All of what this process shares with its lower half is overwritten. */
static void write_out_of_bounds(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[4096];
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        if (!strstr(line, "/channel") || sscanf(line, "%lx-%lx", &start, &end) != 2) continue;
        for (unsigned char *at = (unsigned char *)start; at < (unsigned char *)end; at++) *at = 0xa5;
    }
    if (maps) fclose(maps);
    MPI_Barrier(MPI_COMM_WORLD);
}

/* The last rank leaves without a word, and well, while the others wait for it. */
static void leave_early(void) {
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (rank == size - 1) exit(0);
}

enum { LONG = 1 << 20 };

/* A message of rank 0 whose request it frees; rank 1 receives it when rank 0 has come to its end. */
static void free_request(void) {
    int rank, num_wrong = 0, *data = calloc(LONG, sizeof *data);
    MPI_Request request;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (int i = 0; i < LONG && rank == 0; i++) data[i] = i;
    if (rank == 0) MPI_Isend(data, LONG, MPI_INT, 1, 7, MPI_COMM_WORLD, &request);
    if (rank == 0) MPI_Request_free(&request);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 1) {
        sleep(1);
        MPI_Recv(data, LONG, MPI_INT, 0, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int i = 0; i < LONG; i++) num_wrong += data[i] != i;
    }
    MPI_Finalize();
    if (rank == 0) puts("answer 1");
    exit(num_wrong != 0);
}

/* A message of rank 0, which is gone when rank 1 receives it: a lock tells that. */
static void go_before_a_message(int is_crash) {
    int rank, *data = calloc(LONG, sizeof *data), file = open(own_path, O_RDONLY);
    MPI_Request request;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank == 0) flock(file, LOCK_EX);
    if (rank == 0) MPI_Isend(data, LONG, MPI_INT, 1, 7, MPI_COMM_WORLD, &request);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0 && is_crash) raise(SIGSEGV);
    if (rank == 0) exit(0);
    flock(file, LOCK_EX);
    MPI_Recv(data, LONG, MPI_INT, 0, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void leave_a_message(void) { go_before_a_message(0); }
static void crash_before_a_message(void) { go_before_a_message(1); }

static void crash(void) {
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank == 1) raise(SIGSEGV);
}

static void give_up(void) {
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank == 1) MPI_Abort(MPI_COMM_WORLD, 23);
}

static unsigned seconds;

/* MPI without MPI_Init; the second rank has work to do behind it. */
static void use_a_session(void) {
    MPI_Session session;
    MPI_Group group;
    MPI_Comm world;
    int rank;
    MPI_Session_init(MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &session);
    MPI_Group_from_session_pset(session, "mpi://WORLD", &group);
    MPI_Comm_create_from_group(group, "faults", MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &world);
    MPI_Group_free(&group);
    MPI_Comm_rank(world, &rank);
    MPI_Barrier(world);
    MPI_Comm_free(&world);
    MPI_Session_finalize(&session);
    seconds = 3 * rank;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } kinds[] = {{"end", use_after_end},   {"child", use_in_child}, {"program", start_program}, {"handler", use_in_handler},
                 {"spawn", spawn},         {"faces", mix_faces},    {"bounds", write_out_of_bounds},
                 {"leave", leave_early},   {"crash", crash},        {"abort", give_up},
                 {"again", leave_early},   {"free", free_request},  {"message", leave_a_message},
                 {"dying", crash_before_a_message}};
    own_path = argv[0];
    const char *kind = argc > 1 ? argv[1] : "plain";
    if (!strcmp(kind, "begin")) MPI_Barrier(MPI_COMM_WORLD);
    if (!strcmp(kind, "session") || !strcmp(kind, "again")) use_a_session();
    if (!strcmp(kind, "session")) return sleep(seconds);
    MPI_Init(&argc, &argv);
    MPI_Barrier(MPI_COMM_WORLD);
    for (unsigned i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(kind, kinds[i].name)) kinds[i].run();
    MPI_Barrier(MPI_COMM_WORLD);
    puts("answer 1");
    return MPI_Finalize();
}
