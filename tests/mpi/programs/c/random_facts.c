/* What MPI promises of point-to-point calls, whatever else is under way. */
#include "random_messages.h"

static int class_of(int code) {
    int error_class;
    MPI_Error_class(code, &error_class);
    return error_class;
}

static void check_errors(MPI_Comm comm, int rank, int size) {
    int value = 7, two[2] = {1, 2};
    MPI_Datatype uncommitted;
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Type_contiguous(2, MPI_INT, &uncommitted);
    EXPECT(class_of(MPI_Send(&value, 1, MPI_INT, size, 0, comm)) == MPI_ERR_RANK);
    EXPECT(class_of(MPI_Recv(&value, 1, MPI_INT, size, 0, comm, MPI_STATUS_IGNORE)) == MPI_ERR_RANK);
    EXPECT(class_of(MPI_Send(&value, 1, MPI_INT, rank, -5, comm)) == MPI_ERR_TAG);
    EXPECT(class_of(MPI_Send(&value, -1, MPI_INT, rank, 0, comm)) == MPI_ERR_COUNT);
    EXPECT(class_of(MPI_Send(&value, 1, MPI_DATATYPE_NULL, rank, 0, comm)) == MPI_ERR_TYPE);
    EXPECT(class_of(MPI_Send(two, 1, uncommitted, rank, 0, comm)) == MPI_ERR_TYPE);
    MPI_Type_free(&uncommitted);
    MPI_Isend(two, 2, MPI_INT, rank, 77, comm, &request);
    EXPECT(class_of(MPI_Recv(&value, 1, MPI_INT, rank, 77, comm, MPI_STATUS_IGNORE)) == MPI_ERR_TRUNCATE);
    MPI_Wait(&request, MPI_STATUS_IGNORE);

    /* One of several fails: its status says so. */
    MPI_Request requests[3] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL, MPI_REQUEST_NULL};
    MPI_Status statuses[3];
    int too_small, enough[2];
    MPI_Irecv(&too_small, 1, MPI_INT, rank, 78, comm, &requests[0]);
    MPI_Irecv(enough, 2, MPI_INT, rank, 79, comm, &requests[2]);
    MPI_Send(two, 2, MPI_INT, rank, 78, comm);
    MPI_Send(two, 2, MPI_INT, rank, 79, comm);
    EXPECT(class_of(MPI_Waitall(3, requests, statuses)) == MPI_ERR_IN_STATUS);
    EXPECT(class_of(statuses[0].MPI_ERROR) == MPI_ERR_TRUNCATE && requests[0] == MPI_REQUEST_NULL);
    /* The others may be left for another call. */
    EXPECT((statuses[2].MPI_ERROR == MPI_SUCCESS) == (requests[2] == MPI_REQUEST_NULL));
    MPI_Wait(&requests[2], MPI_STATUS_IGNORE);
    EXPECT(enough[1] == 2);
}

static void check_cancelling(MPI_Comm comm, int rank) {
    int value, flag;
    MPI_Request request;
    MPI_Status status;
    MPI_Irecv(&value, 1, MPI_INT, rank, 90, comm, &request);
    MPI_Cancel(&request);
    MPI_Wait(&request, &status);
    MPI_Test_cancelled(&status, &flag);
    EXPECT(flag && request == MPI_REQUEST_NULL);
}

static void check_nobody(MPI_Comm comm) {
    int value = 5, count, flag, index;
    MPI_Status status;
    MPI_Request request;
    MPI_Message message;
    MPI_Send(&value, 1, MPI_INT, MPI_PROC_NULL, 1, comm);
    MPI_Recv(&value, 1, MPI_INT, MPI_PROC_NULL, 1, comm, &status);
    MPI_Get_count(&status, MPI_INT, &count);
    EXPECT(value == 5 && count == 0 && status.MPI_SOURCE == MPI_PROC_NULL && status.MPI_TAG == MPI_ANY_TAG);
    MPI_Irecv(&value, 1, MPI_INT, MPI_PROC_NULL, 1, comm, &request);
    MPI_Test(&request, &flag, &status);
    EXPECT(flag && status.MPI_SOURCE == MPI_PROC_NULL);
    MPI_Mprobe(MPI_PROC_NULL, 1, comm, &message, &status);
    EXPECT(message == MPI_MESSAGE_NO_PROC);
    MPI_Mrecv(&value, 1, MPI_INT, &message, &status);
    EXPECT(message == MPI_MESSAGE_NULL && status.MPI_SOURCE == MPI_PROC_NULL);
    /* Nothing is waited for. */
    request = MPI_REQUEST_NULL;
    MPI_Waitany(1, &request, &index, &status);
    EXPECT(index == MPI_UNDEFINED && status.MPI_SOURCE == MPI_ANY_SOURCE);
    MPI_Testsome(1, &request, &count, &index, &status);
    EXPECT(count == MPI_UNDEFINED);
    MPI_Wait(&request, &status);
    EXPECT(status.MPI_TAG == MPI_ANY_TAG);
}

static int num_freed;

static int query(void *state, MPI_Status *status) {
    MPI_Status_set_elements(status, MPI_INT, *(int *)state);
    MPI_Status_set_cancelled(status, 0);
    status->MPI_SOURCE = status->MPI_TAG = 3;
    return MPI_SUCCESS;
}
static int release(void *state) { return (void)state, num_freed++, MPI_SUCCESS; }
static int cancel(void *state, int complete) { return (void)state, EXPECT(!complete), MPI_SUCCESS; }

static void *complete_soon(void *request) {
    nanosleep(&(struct timespec){0, 2000000}, NULL);
    MPI_Grequest_complete(*(MPI_Request *)request);
    return NULL;
}

static void check_generalized(void) {
    int elements = 11, count, before = num_freed;
    MPI_Request request, same;
    MPI_Status status;
    pthread_t thread;
    MPI_Grequest_start(query, release, cancel, &elements, &request);
    MPI_Cancel(&request);
    same = request;
    pthread_create(&thread, NULL, complete_soon, &same);
    MPI_Wait(&request, &status);
    pthread_join(thread, NULL);
    MPI_Get_count(&status, MPI_INT, &count);
    EXPECT(count == 11 && status.MPI_SOURCE == 3 && num_freed == before + 1);
}

void check_facts(MPI_Comm errors_return, int rank, int size) {
    /* The error of a list of requests goes to a communicator that implementations choose. */
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    check_errors(errors_return, rank, size);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_ARE_FATAL);
    check_cancelling(errors_return, rank);
    check_nobody(errors_return);
    check_generalized();
}
