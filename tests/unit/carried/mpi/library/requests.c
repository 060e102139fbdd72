/* Requests and sessions at their ends: `requests KIND` prints `answer` if all goes as the standard says. */
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUM_PARTITIONS = 4, NUM_ROUNDS = 20, LENGTH = 20000 };

static void check(int is_so, const char *what) {
    if (is_so) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

/* Every other element of an array, so that it is packed. */
static MPI_Datatype make_sparse(void) {
    MPI_Datatype sparse, type;
    MPI_Type_vector(LENGTH, 1, 2, MPI_INT, &sparse);
    MPI_Type_create_resized(sparse, 0, 2 * LENGTH * (MPI_Aint)sizeof(int), &type);
    MPI_Type_commit(&type);
    MPI_Type_free(&sparse);
    return type;
}

/* ---- partitions that one thread makes ready while another waits ---- */

static MPI_Request sending;

static void *make_ready(void *unused) {
    for (int i = 0; i < NUM_PARTITIONS; i++) MPI_Pready(i, sending);
    return unused;
}

static void send_in_partitions(void) {
    enum { WHOLE = 2 * LENGTH * NUM_PARTITIONS };
    static int from[WHOLE], into[WHOLE];
    MPI_Datatype type = make_sparse();
    MPI_Request receiving;
    MPI_Psend_init(from, NUM_PARTITIONS, 1, type, 0, 1, MPI_COMM_WORLD, MPI_INFO_NULL, &sending);
    MPI_Precv_init(into, NUM_PARTITIONS, 1, type, 0, 1, MPI_COMM_WORLD, MPI_INFO_NULL, &receiving);
    for (int round = 1; round <= NUM_ROUNDS; round++) {
        pthread_t thread;
        for (int i = 0; i < WHOLE; i += 2) from[i] = round + i;
        MPI_Start(&sending);
        MPI_Start(&receiving);
        pthread_create(&thread, NULL, make_ready, NULL);
        MPI_Wait(&sending, MPI_STATUS_IGNORE);
        pthread_join(thread, NULL);
        memset(from, 0, sizeof from);
        MPI_Status status;
        MPI_Wait(&receiving, &status);
        check(status.MPI_TAG == 1 && status.MPI_SOURCE == 0, "the status has the tag that it was made with");
        for (int i = 0; i < WHOLE; i += 2) check(into[i] == round + i, "what was sent has come");
    }
    MPI_Request_free(&sending);
    MPI_Request_free(&receiving);
    MPI_Type_free(&type);
}

/* ---- sends that nobody asks for any more ---- */

static void free_requests(void) {
    static int from[2 * LENGTH], into[2 * LENGTH];
    MPI_Datatype type = make_sparse();
    MPI_Request dense, sparse, kept, unwanted, forgotten;
    MPI_Isend(from, LENGTH, MPI_INT, 0, 1, MPI_COMM_WORLD, &dense);
    MPI_Isend(from, 1, type, 0, 1, MPI_COMM_WORLD, &sparse);
    MPI_Send_init(from, LENGTH, MPI_INT, 0, 1, MPI_COMM_WORLD, &kept);
    MPI_Start(&kept);
    MPI_Request_free(&dense);
    MPI_Request_free(&sparse);
    MPI_Request_free(&kept);
    for (int i = 0; i < 3; i++) MPI_Recv(into, LENGTH, MPI_INT, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Type_free(&type);
    /* Nobody receives these, so MPI must not wait for them. */
    MPI_Isend(from, LENGTH, MPI_INT, 0, 2, MPI_COMM_WORLD, &unwanted);
    MPI_Cancel(&unwanted);
    MPI_Request_free(&unwanted);
    MPI_Isend(from, LENGTH, MPI_INT, 0, 3, MPI_COMM_WORLD, &forgotten);
    MPI_Request_free(&forgotten);
}

/* ---- communicators of a program without MPI_Init ---- */

extern int num_communicators; /* of loopback.c */

/* How a library asks whether its session may be used by all threads. */
static void check_thread_level(MPI_Session session) {
    MPI_Info info;
    char level[64] = "";
    int flag = 0, room = sizeof level;
    MPI_Session_get_info(session, &info);
    MPI_Info_get_string(info, "thread_level", &room, level, &flag);
    check(flag && !strcmp(level, "MPI_THREAD_MULTIPLE"), "a session tells which level of threads it has");
    MPI_Info_free(&info);
}

static void use_sessions(void) {
    for (int i = 0; i < 3; i++) {
        MPI_Session session;
        MPI_Group group;
        MPI_Comm comm;
        MPI_Session_init(MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &session);
        check_thread_level(session);
        MPI_Group_from_session_pset(session, "mpi://WORLD", &group);
        MPI_Comm_create_from_group(group, "requests", MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &comm);
        int before = num_communicators;
        MPI_Comm_free(&comm);
        check(num_communicators == before - 1, "the lower half forgets a communicator that is freed");
        MPI_Group_free(&group);
        MPI_Session_finalize(&session);
    }
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "sessions")) {
        use_sessions();
    } else {
        int provided;
        MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
        if (argc > 1 && !strcmp(argv[1], "partitions")) send_in_partitions();
        else free_requests();
        MPI_Finalize();
    }
    puts("answer");
    return 0;
}
