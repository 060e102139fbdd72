/* Parts of small collectives that have come before they were wanted: a table by collective and sender.
 *
 * Who runs ahead of another may leave it any number of them, so a part is found without a look at the others. Those of
 * one sender for one collective are taken in the order in which they have come.
 */
#include "_engine.h"
#include <stdlib.h>

struct Part {
    uint64_t comm, clock;
    int source, error; /* MPI's class: what the fold of the peer met; 0 for nothing */
    PyObject *theirs;
    Part *next;
};

static Part **chain_of(Part **chains, size_t num_chains, const Part *part) {
    uint64_t mixed = (part->comm ^ part->clock * 0x9e3779b97f4a7c15u ^ (uint64_t)part->source << 40) * 0xff51afd7ed558ccdu;
    return &chains[mixed >> 32 & (num_chains - 1)];
}

static void append(Part **chain, Part *part) {
    while (*chain != NULL) chain = &(*chain)->next;
    *chain = part;
    part->next = NULL;
}

/* As many chains as parts, at least; -1 with an exception. */
static int make_room(Engine *e) {
    if (e->num_parts < e->num_part_chains) return 0;
    size_t num_chains = e->num_part_chains ? 2 * e->num_part_chains : 16;
    Part **chains = calloc(num_chains, sizeof(Part *));
    if (chains == NULL) return PyErr_NoMemory(), -1;
    for (size_t i = 0; i < e->num_part_chains; i++)
        for (Part *part = e->parts[i], *next; part != NULL; part = next) {
            next = part->next;
            append(chain_of(chains, num_chains, part), part);
        }
    free(e->parts);
    e->parts = chains;
    e->num_part_chains = num_chains;
    return 0;
}

int keep_part(Engine *e, uint64_t comm, uint64_t clock, int source, int error, PyObject *theirs) {
    Part *part = make_room(e) ? NULL : malloc(sizeof *part);
    if (part == NULL) {
        Py_DECREF(theirs);
        return PyErr_Occurred() ? -1 : (PyErr_NoMemory(), -1);
    }
    *part = (Part){comm, clock, source, error, theirs, NULL};
    append(chain_of(e->parts, e->num_part_chains, part), part);
    e->num_parts++;
    return 0;
}

PyObject *take_part(Engine *e, uint64_t comm, uint64_t clock, int source, int *error) {
    const Part like = {.comm = comm, .clock = clock, .source = source};
    if (e->num_parts == 0) return NULL;
    Part **at = chain_of(e->parts, e->num_part_chains, &like);
    while (*at != NULL && ((*at)->comm != comm || (*at)->clock != clock || (*at)->source != source)) at = &(*at)->next;
    Part *part = *at;
    if (part == NULL) return NULL;
    *at = part->next;
    e->num_parts--;
    PyObject *theirs = part->theirs;
    *error = part->error;
    free(part);
    return theirs;
}

PyObject *list_parts(Engine *e) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; i < e->num_part_chains; i++)
        for (const Part *part = e->parts[i]; list != NULL && part != NULL; part = part->next) {
            PyObject *built = Py_BuildValue("(KKiiO)", (unsigned long long)part->comm, (unsigned long long)part->clock,
                                            part->source, part->error, part->theirs);
            if (built == NULL || PyList_Append(list, built)) Py_CLEAR(list);
            Py_XDECREF(built);
        }
    return list;
}

void drop_parts(Engine *e) {
    for (size_t i = 0; i < e->num_part_chains; i++)
        for (Part *part = e->parts[i], *next; part != NULL; part = next) {
            next = part->next;
            Py_DECREF(part->theirs);
            free(part);
        }
    free(e->parts);
    e->parts = NULL;
    e->num_parts = e->num_part_chains = 0;
}
