/* A program of messages drawn by chance: `random_messages SEED STEPS [PAUSE_US]`.
 *
 * All ranks draw the same plan for each step. Who sends what to whom decides the answer; by which of MPI's many ways
 * it is sent and received decides nothing. After each step a rank prints a digest of all that it got.
 */
#include "random_messages.h"

#include "gate.h"

static int rank, size;
static MPI_Comm apart, errors_return;

/* Places of one letter: its values stand `stride` integers apart. */
typedef struct {
    const Letter *letter;
    int index, stride, how;
    int32_t *values;
    MPI_Datatype type;
    int type_count;
    MPI_Request request;
    MPI_Status status;
} Mail;

static void mail_begin(Mail *mail, const Plan *plan, int index, uint64_t *how) {
    const Letter *letter = &plan->letters[index];
    *mail = (Mail){.letter = letter, .index = index, .request = MPI_REQUEST_NULL};
    mail->stride = plan->kind == WILD || plan->kind == PARTITIONED ? 1 : 1 + (int)draw(how, 3);
    mail->how = (int)draw(how, 1 << 16);
    mail->values = calloc((size_t)MAX_COUNT * (size_t)mail->stride + 1, sizeof *mail->values);
    mail->type = MPI_INT;
    mail->type_count = letter->count;
    if (mail->stride > 1) {
        MPI_Type_vector(letter->count, 1, mail->stride, MPI_INT, &mail->type);
        MPI_Type_commit(&mail->type);
        mail->type_count = 1;
    }
}

static void mail_end(Mail *mail) {
    if (mail->stride > 1) MPI_Type_free(&mail->type);
    free(mail->values);
}

static void write_mail(Mail *mail, const Plan *plan, int round) {
    for (int k = 0; k < mail->letter->count; k++)
        mail->values[k * mail->stride] = value_of(plan, round, mail->index, k);
}

static uint64_t read_mail(const Mail *mail, const MPI_Status *status) {
    int count;
    MPI_Get_elements(status, mail->type, &count);
    return digest_of(mail->values, mail->stride, status->MPI_SOURCE, status->MPI_TAG, count);
}

void meet(void) {
    for (int step = 1; step < size; step *= 2)
        MPI_Sendrecv(NULL, 0, MPI_INT, (rank + step) % size, 9999, NULL, 0, MPI_INT, (rank - step + size) % size, 9999,
                     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

/* ---- Ways to complete many requests ---- */

static void end_any(int count, MPI_Request requests[], MPI_Status statuses[], int tests) {
    for (int left = count, index, flag; left > 0;) {
        MPI_Status status;
        if (tests) MPI_Testany(count, requests, &index, &flag, &status);
        else MPI_Waitany(count, requests, &index, &status), flag = 1;
        if (!flag) continue;
        if (index == MPI_UNDEFINED) return;
        statuses[index] = status;
        left--;
    }
}

static void end_some(int count, MPI_Request requests[], MPI_Status statuses[], int tests) {
    int indices[MAX_MESSAGES], num_ended;
    MPI_Status ended[MAX_MESSAGES];
    for (;;) {
        if (tests) MPI_Testsome(count, requests, &num_ended, indices, ended);
        else MPI_Waitsome(count, requests, &num_ended, indices, ended);
        if (num_ended == MPI_UNDEFINED) return;
        for (int i = 0; i < num_ended; i++) statuses[indices[i]] = ended[i];
    }
}

static void end_one_by_one(int count, MPI_Request requests[], MPI_Status statuses[], int tests) {
    for (int i = count - 1, flag = 0; i >= 0; i--, flag = 0) {
        while (tests == 1 && !flag) MPI_Test(&requests[i], &flag, &statuses[i]);
        while (tests == 2 && !flag) MPI_Request_get_status(requests[i], &flag, &statuses[i]);
        if (tests != 1) MPI_Wait(&requests[i], &statuses[i]);
    }
}

static void end_all(int count, MPI_Request requests[], MPI_Status statuses[], int way) {
    int flag = 0;
    switch (way % 9) {
    case 0: MPI_Waitall(count, requests, statuses); return;
    case 1: while (!flag) MPI_Testall(count, requests, &flag, statuses); return;
    case 2: case 3: end_any(count, requests, statuses, way % 9 - 2); return;
    case 4: case 5: end_some(count, requests, statuses, way % 9 - 4); return;
    default: end_one_by_one(count, requests, statuses, way % 9 - 6);
    }
}

typedef struct {
    int count, way;
    MPI_Request *requests;
    MPI_Status *statuses;
} Part;

static void *end_part(void *given) {
    Part *part = given;
    end_all(part->count, part->requests, part->statuses, part->way);
    return NULL;
}

/* Completes all mails; by two threads, of which each has its own. */
static void end_mails(Mail mails[], int count, int way) {
    MPI_Request requests[MAX_MESSAGES + 1];
    MPI_Status statuses[MAX_MESSAGES + 1];
    for (int i = 0; i < count; i++) requests[i] = mails[i].request;
    int half = way % 2 ? count / 2 : 0;
    Part first = {half, way / 2, requests, statuses}, second = {count - half, way / 5, requests + half,
        statuses + half};
    pthread_t thread;
    if (half) pthread_create(&thread, NULL, end_part, &first);
    end_part(&second);
    if (half) pthread_join(thread, NULL);
    for (int i = 0; i < count; i++) mails[i].request = requests[i], mails[i].status = statuses[i];
}

/* ---- Messages ---- */

/* Late receives wait for what is sent later by nobody who waits for this rank; all others are posted first. */
static int is_late(const Mail *receive) { return receive->how % 5 == 0; }

static void start_mail(Mail *send, int is_awaited_late) {
    const Letter *to = send->letter;
    void *at = send->values;
    switch (send->how / 8 % (is_awaited_late ? 4 : 8)) {
    case 0: MPI_Isend(at, send->type_count, send->type, to->dest, to->tag, MPI_COMM_WORLD, &send->request); return;
    case 1: MPI_Issend(at, send->type_count, send->type, to->dest, to->tag, MPI_COMM_WORLD, &send->request); return;
    case 2: MPI_Ibsend(at, send->type_count, send->type, to->dest, to->tag, MPI_COMM_WORLD, &send->request); return;
    case 3: MPI_Bsend(at, send->type_count, send->type, to->dest, to->tag, MPI_COMM_WORLD); return;
    case 4: MPI_Send(at, send->type_count, send->type, to->dest, to->tag, MPI_COMM_WORLD); return;
    case 5: MPI_Ssend(at, send->type_count, send->type, to->dest, to->tag, MPI_COMM_WORLD); return;
    case 6: MPI_Rsend(at, send->type_count, send->type, to->dest, to->tag, MPI_COMM_WORLD); return;
    default:
        MPI_Isend(at, send->type_count, send->type, to->dest, to->tag, MPI_COMM_WORLD, &send->request);
        MPI_Request_free(&send->request);
    }
}

static void receive_late(Mail *mail) {
    MPI_Message message;
    MPI_Request request;
    int tag = mail->letter->tag, flag = 0, source = mail->how & 64 ? MPI_ANY_SOURCE : mail->letter->source;
    switch (mail->how / 256 % 4) {
    case 0: MPI_Recv(mail->values, mail->type_count, mail->type, source, tag, MPI_COMM_WORLD, &mail->status); return;
    case 1:
        MPI_Probe(source, tag, MPI_COMM_WORLD, &mail->status);
        MPI_Recv(mail->values, mail->type_count, mail->type, mail->status.MPI_SOURCE, tag, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
        return;
    case 2:
        MPI_Mprobe(source, tag, MPI_COMM_WORLD, &message, &mail->status);
        MPI_Mrecv(mail->values, mail->type_count, mail->type, &message, &mail->status);
        return;
    default:
        while (!flag) MPI_Improbe(source, tag, MPI_COMM_WORLD, &flag, &message, &mail->status);
        MPI_Imrecv(mail->values, mail->type_count, mail->type, &message, &request);
        MPI_Wait(&request, &mail->status);
    }
}

static uint64_t do_messages(const Plan *plan) {
    uint64_t how = plan->how, digest = 0;
    Mail in[MAX_MESSAGES], out[MAX_MESSAGES];
    int num_in = 0, num_out = 0, late[MAX_MESSAGES] = {0};
    for (int i = 0; i < plan->num_letters; i++) {
        Mail receive, send;
        mail_begin(&receive, plan, i, &how);
        mail_begin(&send, plan, i, &how);
        late[i] = is_late(&receive);
        if (receive.letter->dest == rank) in[num_in++] = receive;
        else mail_end(&receive);
        if (send.letter->source == rank) out[num_out++] = send;
        else mail_end(&send);
    }
    for (int i = 0; i < num_in; i++) {
        int source = in[i].how & 128 ? MPI_ANY_SOURCE : in[i].letter->source;
        if (!is_late(&in[i]))
            MPI_Irecv(in[i].values, in[i].type_count, in[i].type, source, in[i].letter->tag, MPI_COMM_WORLD,
                      &in[i].request);
    }
    meet(); /* MPI_Rsend wants its receive to be there */
    for (int i = 0; i < num_out; i++) {
        write_mail(&out[i], plan, 0);
        start_mail(&out[i], late[out[i].index]);
    }
    for (int i = 0; i < num_in; i++) {
        if (!is_late(&in[i])) continue;
        receive_late(&in[i]);
        digest += read_mail(&in[i], &in[i].status);
    }
    end_mails(in, num_in, (int)draw(&how, 90));
    end_mails(out, num_out, (int)draw(&how, 90));
    for (int i = 0; i < num_in; i++)
        if (!is_late(&in[i])) digest += read_mail(&in[i], &in[i].status);
    meet(); /* what a freed request sends has been received */
    for (int i = 0; i < num_in; i++) mail_end(&in[i]);
    for (int i = 0; i < num_out; i++) mail_end(&out[i]);
    return digest;
}

/* ---- Any source, any tag ---- */

static void receive_wild(Mail *mail, int way) {
    MPI_Status seen;
    MPI_Message message;
    switch (way) {
    case 0: MPI_Recv(mail->values, MAX_COUNT, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, apart, &mail->status); return;
    case 1:
        MPI_Probe(MPI_ANY_SOURCE, MPI_ANY_TAG, apart, &seen);
        MPI_Recv(mail->values, MAX_COUNT, MPI_INT, seen.MPI_SOURCE, seen.MPI_TAG, apart, &mail->status);
        EXPECT(seen.MPI_SOURCE == mail->status.MPI_SOURCE && seen.MPI_TAG == mail->status.MPI_TAG);
        return;
    case 2:
        MPI_Mprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, apart, &message, &seen);
        MPI_Mrecv(mail->values, MAX_COUNT, MPI_INT, &message, &mail->status);
        return;
    default:
        MPI_Irecv(mail->values, MAX_COUNT, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, apart, &mail->request);
    }
}

static uint64_t do_wild(const Plan *plan) {
    uint64_t how = plan->how, digest = 0;
    Mail in[MAX_MESSAGES], out[MAX_MESSAGES];
    int num_in = 0, num_out = 0, way = (int)draw(&how, 4);
    meet(); /* messages of the last such step have all been received */
    for (int i = 0; i < plan->num_letters; i++) {
        if (plan->letters[i].source == rank) {
            Mail *send = &out[num_out++];
            mail_begin(send, plan, i, &how);
            write_mail(send, plan, 0);
            MPI_Isend(send->values, send->type_count, send->type, send->letter->dest, i, apart, &send->request);
        }
        if (plan->letters[i].dest == rank) mail_begin(&in[num_in++], plan, i, &how);
    }
    for (int i = 0; i < num_in; i++) receive_wild(&in[i], way);
    if (way == 3) end_mails(in, num_in, (int)draw(&how, 90));
    end_mails(out, num_out, 0);
    for (int i = 0; i < num_in; i++) {
        digest += read_mail(&in[i], &in[i].status);
        mail_end(&in[i]);
    }
    for (int i = 0; i < num_out; i++) mail_end(&out[i]);
    return digest;
}

/* ---- Persistent and partitioned ---- */

static void init_mail(Mail *mail, int sends, int parts) {
    const Letter *letter = mail->letter;
    int tag = letter->tag;
#if MPI_VERSION >= 4
    if (parts) {
        int count = letter->count / parts;
        if (sends) MPI_Psend_init(mail->values, parts, count, MPI_INT, letter->dest, tag, MPI_COMM_WORLD,
                                  MPI_INFO_NULL, &mail->request);
        else MPI_Precv_init(mail->values, parts, count, MPI_INT, letter->source, tag, MPI_COMM_WORLD, MPI_INFO_NULL,
                            &mail->request);
        return;
    }
#endif
    (void)parts;
    if (!sends) MPI_Recv_init(mail->values, mail->type_count, mail->type, letter->source, tag, MPI_COMM_WORLD,
                              &mail->request);
    else if (mail->how % 3 == 0) MPI_Send_init(mail->values, mail->type_count, mail->type, letter->dest, tag,
                                               MPI_COMM_WORLD, &mail->request);
    else if (mail->how % 3 == 1) MPI_Ssend_init(mail->values, mail->type_count, mail->type, letter->dest, tag,
                                                MPI_COMM_WORLD, &mail->request);
    else MPI_Bsend_init(mail->values, mail->type_count, mail->type, letter->dest, tag, MPI_COMM_WORLD, &mail->request);
}

/* All partitions become ready, in some order. */
static void get_ready(Mail *mail, int parts) {
#if MPI_VERSION >= 4
    if (parts && mail->how % 2) MPI_Pready_range(0, parts - 1, mail->request);
    for (int i = parts - 1; i >= 0 && !(mail->how % 2); i--) MPI_Pready(i, mail->request);
#else
    (void)mail, (void)parts;
#endif
}

static uint64_t do_again(const Plan *plan) {
    uint64_t how = plan->how, digest = 0;
    Mail in[MAX_MESSAGES], out[MAX_MESSAGES];
    int num_in = 0, num_out = 0, parts = MPI_VERSION >= 4 && plan->kind == PARTITIONED ? plan->num_parts : 0;
    for (int i = 0; i < plan->num_letters; i++) {
        if (plan->letters[i].source == rank) mail_begin(&out[num_out], plan, i, &how), init_mail(&out[num_out++], 1,
                                                                                                 parts);
        if (plan->letters[i].dest == rank) mail_begin(&in[num_in], plan, i, &how), init_mail(&in[num_in++], 0, parts);
    }
    for (int round = 0; round < plan->num_rounds; round++) {
        for (int i = 0; i < num_in; i++) MPI_Start(&in[i].request);
        for (int i = 0; i < num_out; i++) {
            if (!parts) write_mail(&out[i], plan, round);
            MPI_Start(&out[i].request);
            if (parts) write_mail(&out[i], plan, round);
            get_ready(&out[i], parts);
        }
        end_mails(in, num_in, 2 * (int)draw(&how, 2));
        end_mails(out, num_out, 0);
        for (int i = 0; i < num_in; i++)
            digest += digest_of(in[i].values, in[i].stride, in[i].letter->source, in[i].letter->tag,
                                in[i].letter->count);
    }
    for (int i = 0; i < num_in; i++) MPI_Request_free(&in[i].request), mail_end(&in[i]);
    for (int i = 0; i < num_out; i++) MPI_Request_free(&out[i].request), mail_end(&out[i]);
    return digest;
}

/* ---- Both ways at once ---- */

static uint64_t do_exchange(const Plan *plan) {
    uint64_t how = plan->how;
    int from = 0;
    while (plan->letters[from].dest != rank) from++;
    Mail in, out;
    mail_begin(&out, plan, rank, &how);
    mail_begin(&in, plan, from, &how);
    write_mail(&out, plan, 0);
    if (how % 2) {
        MPI_Sendrecv(out.values, out.type_count, out.type, out.letter->dest, rank, in.values, in.type_count, in.type,
                     in.letter->source, from, MPI_COMM_WORLD, &in.status);
    } else {
        for (int k = 0; k < out.letter->count; k++) in.values[k * in.stride] = out.values[k * out.stride];
        MPI_Sendrecv_replace(in.values, in.type_count, in.type, out.letter->dest, rank, in.letter->source, from,
                             MPI_COMM_WORLD,
                             &in.status);
    }
    uint64_t digest = read_mail(&in, &in.status);
    mail_end(&in), mail_end(&out);
    return digest;
}

static uint64_t do_step(const Plan *plan) {
    switch (plan->kind) {
    case MESSAGES: return do_messages(plan);
    case WILD: return do_wild(plan);
    case PERSISTENT: case PARTITIONED: return do_again(plan);
    case EXCHANGE: return do_exchange(plan);
    default: return check_facts(errors_return, rank, size), 0;
    }
}

int main(int argc, char **argv) {
    if (argc < 3) return fprintf(stderr, "usage: %s SEED STEPS [PAUSE_US]\n", argv[0]), 2;
    uint64_t seed = strtoull(argv[1], NULL, 10);
    int steps = atoi(argv[2]), provided, buffer_bytes;
    long pause_us = argc > 3 ? atol(argv[3]) : 0;
    void *buffer = malloc(1 << 25);
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_dup(MPI_COMM_WORLD, &apart);
    MPI_Comm_dup(MPI_COMM_WORLD, &errors_return);
    MPI_Comm_set_errhandler(errors_return, MPI_ERRORS_RETURN);
    MPI_Buffer_attach(buffer, 1 << 25);
    for (int step = 0; step < steps; step++) {
        Plan plan;
        if (rank == 0 && step == steps - 1) wait_at_gate();
        draw_plan(&plan, seed, (uint64_t)step, size);
        uint64_t digest = do_step(&plan);
        printf("rank %d step %d %s %016llx\n", rank, step, kind_names[plan.kind], (unsigned long long)digest);
        fflush(stdout);
        if (pause_us) nanosleep(&(struct timespec){0,
                                (long)(mix(seed ^ (uint64_t)(step * size + rank)) % (uint64_t)pause_us) * 1000}, NULL);
    }
    MPI_Buffer_detach(&buffer, &buffer_bytes);
    free(buffer);
    MPI_Comm_free(&apart);
    MPI_Comm_free(&errors_return);
    MPI_Finalize();
    if (rank == 0) printf("answer %d steps\n", steps);
    return 0;
}
