/* How an Engine carries long payloads over a network: in pieces, some of them under way at a time.
 *
 *     sender    ANNOUNCED ────────────>  matches a receive
 *               stream   <────────────  WANTED (tag of the stream, bytes of a piece)
 *               piece, piece, ... ─────>  written into the receiver's program
 *
 * A piece is copied between the program and a buffer of ours while others are on their way; where the program's buffer
 * is shared with us MPI works on it in place; if both are, the payload is one message of MPI's. A payload of unknown
 * size, or longer than its buffer, is gathered here. A stream that has begun ends also while closed.
 *
 * The first bytes, as many as a piece has, do not wait to be wanted, which saves a round trip: they go ahead, on a tag of
 * the sender's, and MPI moves them as soon as the receiver, where a receive has matched, asks MPI for them. What follows
 * them is WANTED. They go in halves, one copied while the other is on its way, or as one where nothing is copied.
 *
 *     sender    ANNOUNCED_AHEAD ──────>  matches a receive
 *               two pieces ───────────>
 *               stream   <────────────  WANTED (as above, and from which byte on), if there is more
 *
 * These sends are synchronous (MPI 4.1, section 3.4): they end when a receive has matched, whatever MPI has copied before.
 * Until then the payload is the program's, and part of its image. When ranks close, nothing may stay in MPI:
 *
 *     sender    notes that its end will mean nothing  <──────  DECLINED
 *               GIVEN_UP ─────────────>  takes it from MPI, and throws it away
 *
 * and then the message is announced, and no more, on both sides. The answer must come first: a receive that is posted
 * before it could end the send while it still counts.
 */
#include "_engine.h"
#include <stdlib.h>

enum { MOST_SPARE = 8, NUM_STREAM_TAGS = 15000, LARGEST_PIECE_BYTES = 1 << 28 };
/* Payloads that a rank sends ahead at a time: MPI may buffer some of each for ranks that do not receive. */
enum { MOST_AHEAD = 4 };

int new_stream_tag(Engine *e) {
    /* MPI promises tags up to 32767; 0 is that of wire messages. */
    e->next_stream = (e->next_stream + 1) % NUM_STREAM_TAGS;
    return 1 + e->next_stream;
}

int is_stream_tag(int64_t tag) { return tag > 0 && tag <= NUM_STREAM_TAGS; }

/* Tags of senders follow those of receivers. */
int is_ahead_tag(int tag) { return tag > NUM_STREAM_TAGS && tag <= 2 * NUM_STREAM_TAGS; }

/* Whether of a payload only what went ahead has been sent, and nothing more is wanted yet. */
static int is_only_ahead(const Stream *one) { return one->is_sending && one->ahead && one->total == one->ahead; }

int new_ahead_tag(Engine *e, int dest) {
    int count = 0;
    for (size_t i = 0; i < e->num_streams; i++) count += is_only_ahead(&e->streams[i]);
    if (e->neighbours[dest] || count >= MOST_AHEAD) return 0;
    int tag, is_taken;
    do {
        e->next_ahead = (e->next_ahead + 1) % NUM_STREAM_TAGS;
        tag = 1 + NUM_STREAM_TAGS + e->next_ahead;
        is_taken = 0;
        for (size_t i = 0; i < e->num_streams; i++) is_taken |= e->streams[i].ahead_tag == tag;
    } while (is_taken);
    return tag;
}

int has_moving_stream(const Engine *e) {
    for (size_t i = 0; i < e->num_streams; i++)
        if (!is_only_ahead(&e->streams[i])) return 1;
    return 0;
}

/* Fresh buffers cost page faults, so used ones are kept. */
static char *borrow(Engine *e) {
    return e->num_spare ? e->spare[--e->num_spare] : malloc((size_t)e->piece_bytes);
}

static void give_back(Engine *e, char *buffer) {
    if (buffer == NULL) return;
    if (e->spare == NULL) e->spare = calloc(MOST_SPARE, sizeof *e->spare);
    if (e->spare != NULL && e->num_spare < MOST_SPARE) e->spare[e->num_spare++] = buffer;
    else free(buffer);
}

static Stream *push_stream(Engine *e, Request *request, int64_t total, int64_t piece_bytes) {
    Stream *streams = with_room(e->streams, e->num_streams, &e->room_streams, sizeof *streams);
    if (streams == NULL) return NULL;
    e->streams = streams;
    Stream *one = &e->streams[e->num_streams++];
    memset(one, 0, sizeof *one);
    Py_XINCREF((PyObject *)request);
    one->request = request;
    one->total = total;
    one->piece_bytes = piece_bytes;
    return one;
}

/* How much of a payload goes ahead. */
static int64_t bytes_ahead(const Engine *e, int64_t num_bytes) {
    return num_bytes < e->piece_bytes ? num_bytes : e->piece_bytes;
}

/* Of pieces that are copied, which stay in a core's cache then. */
static int64_t copied_piece(const Engine *e) { return e->piece_bytes / 2; }

int ahead_piece(const Engine *e, int is_whole) { return (int)(is_whole ? e->piece_bytes : copied_piece(e)); }

int stream_in(Engine *e, Request *request, const Arrived *message) {
    int64_t num_bytes = message->num_bytes;
    /* All arenas have the same addresses: between two of them the payload is one message of MPI's. */
    int is_shared = in_arena(e, message->address, num_bytes) != NULL && gathered(request) == NULL &&
                    in_arena(e, request->address, num_bytes) != NULL;
    Stream *one = push_stream(e, request, num_bytes, is_shared ? LARGEST_PIECE_BYTES : copied_piece(e));
    if (one == NULL) return -1;
    one->peer = message->source;
    one->ahead_tag = message->ahead;
    one->ahead = message->ahead ? bytes_ahead(e, num_bytes) : 0;
    one->ahead_piece = message->ahead_piece;
    /* An empty message is wanted, too: its synchronous sender waits to hear that a receive has matched. */
    if (message->ahead && one->ahead == num_bytes) return 0;
    one->tag = new_stream_tag(e);
    uint64_t fields[7] = {request->comm, (uint64_t)one->ahead, WHAT_WANTED, message->sender_request, (uint64_t)one->tag, 0,
                          (uint64_t)one->piece_bytes};
    return send_wire(e, one->peer, fields, NULL, 0);
}

/* The stream of what went ahead with a request and is not followed by what is wanted. */
static Stream *find_ahead(Engine *e, const Request *request) {
    for (size_t i = 0; i < e->num_streams; i++) {
        Stream *one = &e->streams[i];
        if (one->request == request && is_only_ahead(one)) return one;
    }
    return NULL;
}

int stream_out(Engine *e, int dest, Request *request, Wanted wanted) {
    int64_t most = in_arena(e, request->address, request->num_bytes) != NULL ? LARGEST_PIECE_BYTES : e->piece_bytes;
    if (wanted.piece_bytes <= 0 || wanted.piece_bytes > most)
        return PyErr_Format(PyExc_ValueError, "rank %d wants pieces of %lld bytes, expected 1 to %lld", dest,
                            (long long)wanted.piece_bytes, (long long)most), -1;
    Stream *one = find_ahead(e, request);
    if (one != NULL && one->is_declined) one = NULL;
    int64_t ahead = one == NULL ? 0 : one->ahead;
    if (wanted.from != ahead || (one != NULL && ahead == request->num_bytes))
        return PyErr_Format(PyExc_ValueError, "rank %d wants bytes from %lld on, and %lld of %lld were sent ahead", dest,
                            (long long)wanted.from, (long long)ahead, (long long)request->num_bytes), -1;
    if (one == NULL && (one = push_stream(e, request, 0, 0)) == NULL) return -1;
    one->is_sending = 1;
    one->peer = dest;
    one->tag = wanted.tag;
    one->total = request->num_bytes;
    one->piece_bytes = wanted.piece_bytes;
    return 0;
}

/* Where MPI works on a piece in place; NULL where it is copied. */
static char *place_of(Engine *e, const Stream *one, int64_t num_bytes) {
    if (one->request == NULL) return NULL;
    char *here = one->is_sending ? NULL : gathered(one->request);
    return here != NULL ? here + one->started : in_arena(e, one->request->address + (uint64_t)one->started, num_bytes);
}

/* Hand the next piece to MPI. */
static int start_piece(Engine *e, Stream *one) {
    Piece *piece = &one->pieces[(one->first + one->count) % PIECES_IN_FLIGHT];
    int is_ahead = one->started < one->ahead;
    int64_t left = (is_ahead ? one->ahead : one->total) - one->started;
    int64_t most = is_ahead ? one->ahead_piece : one->piece_bytes;
    memset(piece, 0, sizeof *piece);
    piece->num_bytes = left < most ? left : most;
    char *place = place_of(e, one, piece->num_bytes);
    if (place == NULL) {
        if ((place = piece->buffer = borrow(e)) == NULL) return PyErr_NoMemory(), -1;
        if (one->is_sending && carry_memory(e, one->request->address + (uint64_t)one->started, place, piece->num_bytes, 0))
            return -1;
    }
    int which = !one->is_sending ? FN_IRECV : is_ahead ? FN_ISSEND : FN_ISEND, tag = is_ahead ? one->ahead_tag : one->tag;
    int (*start)(void *, int, Handle, int, int, Handle, uint64_t *) = e->function[which];
    int code = start(place, (int)piece->num_bytes, e->byte, one->peer, tag, e->comm, &piece->real);
    if (code) return mpi_failed(one->is_sending ? "sending a piece" : "receiving a piece", code);
    one->started += piece->num_bytes;
    one->count++;
    return 0;
}

/* The oldest piece is over. */
static int end_piece(Engine *e, Stream *one) {
    Piece *piece = &one->pieces[one->first];
    int is_copied = !one->is_sending && one->request != NULL && piece->buffer != NULL;
    if (is_copied && carry_memory(e, one->request->address + (uint64_t)one->ended, piece->buffer, piece->num_bytes, 1)) return -1;
    one->ended += piece->num_bytes;
    one->first = (one->first + 1) % PIECES_IN_FLIGHT;
    one->count--;
    give_back(e, piece->buffer);
    return 0;
}

int stream_ahead(Engine *e, Request *request, int tag) {
    int64_t ahead = bytes_ahead(e, request->num_bytes);
    Stream *one = push_stream(e, request, ahead, ahead);
    if (one == NULL) return -1;
    /* Two halves that copy on one core would take turns. */
    leave_program(e);
    one->is_sending = 1;
    one->peer = request->peer;
    one->ahead = ahead;
    one->ahead_tag = tag;
    one->ahead_piece = ahead_piece(e, in_arena(e, request->address, request->num_bytes) != NULL);
    while (one->started < ahead) {
        if (start_piece(e, one)) return -1;
        /* MPI may move the one before the next is copied. */
        look_at_stream(e, one);
    }
    return 0;
}

int decline(Engine *e, Arrived *message) {
    uint64_t fields[7] = {message->comm, 0, WHAT_DECLINED, message->sender_request, (uint64_t)message->ahead, 0, 0};
    message->ahead = 0;
    return send_wire(e, message->source, fields, NULL, 0);
}

int hear_declined(Engine *e, int dest, const Request *request) {
    Stream *one = find_ahead(e, request);
    if (one == NULL || one->peer != dest)
        return PyErr_Format(PyExc_ValueError, "rank %d declines what was not sent ahead to it", dest), -1;
    one->is_declined = 1;
    uint64_t fields[7] = {
        request->comm, (uint64_t)one->ahead_piece, WHAT_GIVEN_UP, 0, (uint64_t)one->ahead_tag, 0, (uint64_t)one->ahead};
    return send_wire(e, dest, fields, NULL, 0);
}

void give_up_ahead(Engine *e) {
    for (size_t i = 0; i < e->num_streams; i++)
        if (is_only_ahead(&e->streams[i])) e->streams[i].is_declined = 1;
}

int discard_ahead(Engine *e, int source, int64_t tag, int64_t num_bytes, int64_t piece_bytes) {
    int is_in_two = num_bytes <= 2 * piece_bytes && piece_bytes <= e->piece_bytes;
    if (tag > INT_MAX || !is_ahead_tag((int)tag) || !is_in_two || num_bytes <= 0 || num_bytes > e->piece_bytes)
        return PyErr_Format(PyExc_ValueError,
                            "rank %d sends %lld bytes ahead in pieces of %lld with tag %lld, expected 1 to %lld in at most two "
                            "pieces with a tag from %d to %d; run one version of remesh on all ranks",
                            source, (long long)num_bytes, (long long)piece_bytes, (long long)tag, (long long)e->piece_bytes,
                            NUM_STREAM_TAGS + 1, 2 * NUM_STREAM_TAGS), -1;
    Stream *one = push_stream(e, NULL, num_bytes, piece_bytes);
    if (one == NULL) return -1;
    one->peer = source;
    one->ahead_tag = (int)tag;
    one->ahead = num_bytes;
    one->ahead_piece = piece_bytes;
    return 0;
}

int discard(Engine *e, Arrived *message) {
    int tag = message->ahead;
    message->ahead = 0;
    return discard_ahead(e, message->source, tag, bytes_ahead(e, message->num_bytes), message->ahead_piece);
}

int look_at_stream(Engine *e, Stream *one) {
    int (*test)(uint64_t *, int *, void *) = e->function[FN_TEST];
    if (one->count == 0) return 0;
    Piece *piece = &one->pieces[one->first];
    if (!piece->over) {
        int code = test(&piece->real, &piece->over, e->status);
        if (code) e->mpi_problem = code;
    }
    return piece->over;
}

/* Whether all of it has been moved; what went ahead of more waits for that to be wanted. */
static int is_at_end(const Stream *one) {
    int is_all = !one->is_sending || one->is_declined || one->total == one->request->num_bytes;
    return is_all && one->ended == one->total;
}

/* All of it has been moved. */
static void end_stream(Engine *e, Stream *one) {
    Request *request = one->request;
    if (request == NULL) return;
    request->written = !one->is_sending && gathered(request) == NULL;
    if (!one->is_declined) complete(e, request);
    Py_DECREF((PyObject *)request);
}

int stream_on(Engine *e) {
    int progress = 0, num_discarding = 0;
    size_t kept = 0, count = e->num_streams;
    for (size_t i = 0; i < count; i++) {
        Stream *one = &e->streams[i];
        if (one->request == NULL && num_discarding++) {
            /* One at a time, however many ranks have sent some: each takes buffers of ours. */
            e->streams[kept++] = *one;
            continue;
        }
        while (look_at_stream(e, one) && !e->mpi_problem) {
            progress = 1;
            if (end_piece(e, one)) return -1;
            /* What has come makes room for the next before anything else: the other side waits for it. */
            if (one->started < one->total && start_piece(e, one)) return -1;
        }
        while (one->started < one->total && one->count < PIECES_IN_FLIGHT) {
            progress = 1;
            if (start_piece(e, one)) return -1;
        }
        if (!is_at_end(one)) {
            e->streams[kept++] = *one;
            continue;
        }
        progress = 1;
        end_stream(e, one);
    }
    e->num_streams = kept;
    return progress;
}

void drop_streams(Engine *e) {
    for (size_t i = 0; i < e->num_streams; i++) Py_XDECREF((PyObject *)e->streams[i].request);
    while (e->num_spare) free(e->spare[--e->num_spare]);
    free(e->streams);
    free(e->spare);
    e->streams = NULL;
    e->spare = NULL;
    e->num_streams = e->room_streams = 0;
}
