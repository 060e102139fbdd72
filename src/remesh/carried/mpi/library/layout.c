/* Layouts: how they are made, kept small, and walked. See layout.h. */
#include "layout.h"

#include "basic.h"

static Layout *new_layout(void) {
    Layout *layout = NEW(Layout);
    layout->references = 1;
    return layout;
}

Layout *leaf_layout(Basic basic, MPI_Count count) {
    Layout *layout = new_layout();
    layout->basic = basic;
    layout->size = layout->end = basic_of(basic)->size * count;
    layout->num_values = count;
    layout->is_run = true;
    return layout;
}

Layout *keep_layout(Layout *layout) {
    layout->references++;
    return layout;
}

void drop_layout(Layout *layout) {
    if (--layout->references) return;
    for (MPI_Count i = 0; i < layout->num_parts; i++) drop_layout(layout->parts[i].layout);
    free(layout->parts);
    free(layout);
}

/* ---- Making them ---- */

static bool is_one_run(const Part *part) {
    return part->layout->is_run && (part->count == 1 || part->stride == part->layout->size);
}

/* Sums up the parts. */
static void measure(Layout *layout) {
    MPI_Aint next = 0;
    layout->is_run = true;
    for (MPI_Count i = 0; i < layout->num_parts; i++) {
        const Part *part = &layout->parts[i];
        MPI_Aint reach = (part->count - 1) * part->stride;
        MPI_Aint first = part->offset + part->layout->first + (reach < 0 ? reach : 0);
        MPI_Aint end = part->offset + part->layout->end + (reach > 0 ? reach : 0);
        layout->is_run = layout->is_run && is_one_run(part) && (i == 0 || next == first);
        next = end;
        layout->first = i == 0 || first < layout->first ? first : layout->first;
        layout->end = i == 0 || end > layout->end ? end : layout->end;
        layout->size += part->count * part->layout->size;
        layout->num_values += part->count * part->layout->num_values;
    }
}

/* A layout that needs no node of its own; NULL if it does. */
static Layout *simpler(MPI_Count num_parts, const Part *parts) {
    if (num_parts == 0) return leaf_layout(BASIC_BYTE, 0);
    if (num_parts > 1 || parts->offset) return NULL;
    if (parts->count == 1) return keep_layout(parts->layout);
    bool is_leaf = parts->layout->num_parts == 0 && is_one_run(parts);
    return is_leaf ? leaf_layout(parts->layout->basic, parts->count * parts->layout->num_values) : NULL;
}

Layout *layout_of_parts(MPI_Count num_parts, Part *parts) {
    MPI_Count num_kept = 0;
    for (MPI_Count i = 0; i < num_parts; i++) {
        if (parts[i].count > 0 && parts[i].layout->size > 0) parts[num_kept++] = parts[i];
    }
    Layout *layout = simpler(num_kept, parts);
    if (layout) {
        free(parts);
        return layout;
    }
    layout = new_layout();
    layout->num_parts = num_kept;
    layout->parts = must_have(realloc(parts, (size_t)num_kept * sizeof *parts));
    for (MPI_Count i = 0; i < num_kept; i++) keep_layout(layout->parts[i].layout);
    measure(layout);
    return layout;
}

/* Whether the last part goes on with this one: then it has taken it in. */
static bool goes_on(Part *last, const Part *part) {
    if (last->layout != part->layout) return false;
    MPI_Aint stride = last->count == 1 ? part->offset - last->offset : last->stride;
    bool is_next = part->offset == last->offset + last->count * stride;
    if (!is_next || (part->count > 1 && part->stride != stride)) return false;
    last->stride = stride;
    last->count += part->count;
    return true;
}

void add_part(PartList *list, Part part) {
    if (part.count <= 0) return;
    if (list->num_parts && goes_on(&list->parts[list->num_parts - 1], &part)) return;
    if (list->num_parts == list->room) {
        list->room = list->room ? 2 * list->room : 4;
        list->parts = must_have(realloc(list->parts, (size_t)list->room * sizeof *list->parts));
    }
    list->parts[list->num_parts++] = part;
}

/* ---- Walking ---- */

bool visit_rows(const Part *part, MPI_Aint base, bool (*each)(void *state, Row row), void *state) {
    const Layout *layout = part->layout;
    base += part->offset;
    if (layout->is_run) {
        Row row = {base + layout->first, part->stride, layout->size, part->count};
        if (is_one_run(part)) row = (Row){row.offset, 0, row.num_bytes * row.count, 1};
        return row.num_bytes == 0 || row.count == 0 || each(state, row);
    }
    for (MPI_Count copy = 0; copy < part->count; copy++, base += part->stride) {
        for (MPI_Count i = 0; i < layout->num_parts; i++) {
            if (!visit_rows(&layout->parts[i], base, each, state)) return false;
        }
    }
    return true;
}

void visit_values(const Part *part, MPI_Aint base, void (*each)(void *state, Values values), void *state) {
    const Layout *layout = part->layout;
    base += part->offset;
    bool is_leaf = layout->num_parts == 0;
    if (is_leaf && is_one_run(part)) {
        each(state, (Values){base, part->count * layout->num_values, layout->basic});
        return;
    }
    for (MPI_Count copy = 0; copy < part->count; copy++, base += part->stride) {
        if (is_leaf) each(state, (Values){base, layout->num_values, layout->basic});
        for (MPI_Count i = 0; i < layout->num_parts; i++) visit_values(&layout->parts[i], base, each, state);
    }
}

MPI_Count values_in(const Layout *layout, MPI_Count num_bytes) {
    if (num_bytes == 0) return 0;
    if (layout->num_parts == 0) {
        MPI_Count size = basic_of(layout->basic)->size;
        return num_bytes % size ? -1 : num_bytes / size;
    }
    MPI_Count num_values = 0;
    for (MPI_Count i = 0; i < layout->num_parts && num_bytes > 0; i++) {
        const Part *part = &layout->parts[i];
        MPI_Count whole = num_bytes / part->layout->size;
        if (whole >= part->count) whole = part->count;
        num_values += whole * part->layout->num_values;
        num_bytes -= whole * part->layout->size;
        if (whole == part->count) continue;
        MPI_Count more = values_in(part->layout, num_bytes);
        return more < 0 ? -1 : num_values + more;
    }
    return num_values;
}
