// Boost.MPI: objects of C++, operations, exceptions, communicators of graphs and grids: `maps STEPS`.
#include <boost/mpi.hpp>
#include <boost/mpi/cartesian_communicator.hpp>
#include <boost/mpi/graph_communicator.hpp>
#include <boost/graph/adjacency_list.hpp>
#include <boost/serialization/map.hpp>
#include <boost/serialization/string.hpp>
#include <boost/serialization/vector.hpp>
#include <iostream>
#include <sstream>

namespace mpi = boost::mpi;
typedef std::map<std::string, std::vector<double>> Map;

struct Merge {
    Map operator()(const Map &a, const Map &b) const {
        Map both = a;
        for (const auto &item : b) both[item.first].insert(both[item.first].end(), item.second.begin(), item.second.end());
        return both;
    }
};

struct Point {
    int x;
    double y;
    template <class Archive> void serialize(Archive &archive, const unsigned) { archive &x &y; }
};
Point operator+(const Point &a, const Point &b) { return Point{a.x + b.x, a.y + b.y}; }
BOOST_IS_MPI_DATATYPE(Point)
BOOST_CLASS_TRACKING(Point, boost::serialization::track_never)

int main(int argc, char **argv) {
    mpi::environment environment(argc, argv, mpi::threading::multiple, false);
    mpi::communicator world;
    const int rank = world.rank(), size = world.size(), steps = std::atoi(argv[1]);
    mpi::cartesian_communicator ring(world, mpi::cartesian_topology({{size, true}}), true);
    unsigned long answer = 0;
    for (int step = 0; step < steps; step++) {
        Map own;
        own["rank " + std::to_string(rank % 2)] = std::vector<double>(step % 5 + 1, rank + step * 0.5);
        Map everything = mpi::all_reduce(world, own, Merge());
        const std::pair<int, int> beside = ring.shifted_ranks(0, 1);
        Map got;
        std::vector<mpi::request> requests;
        requests.push_back(ring.isend(beside.second, step, everything));
        requests.push_back(ring.irecv(beside.first, step, got));
        mpi::wait_all(requests.begin(), requests.end());
        std::ostringstream text;
        for (const auto &item : got) {
            text << item.first;
            for (double value : item.second) text << ' ' << value;
        }
        Point sum = mpi::all_reduce(world, Point{rank, step * 1.5}, std::plus<Point>());
        std::vector<std::string> words;
        mpi::all_gather(world, std::string(step % 7, 'a' + rank), words);
        std::vector<Point> points(3, Point{step, 1.0}), theirs(3);
        if (rank == 0) {
            world.send(size - 1, 7, mpi::skeleton(points));
            world.send(size - 1, 8, mpi::get_content(points));
        } else if (rank == size - 1) {
            world.recv(0, 7, mpi::skeleton(theirs));
            world.recv(0, 8, mpi::get_content(theirs));
        }
        mpi::broadcast(world, theirs, size - 1);
        for (const std::string &word : words) text << word;
        text << sum.x << ' ' << sum.y << ' ' << theirs[1].x;
        int code = 0;
        try {
            world.send(size, 0, step);
        } catch (mpi::exception &thrown) {
            code = thrown.error_class();
        }
        if (code != MPI_ERR_RANK) world.abort(3);
        mpi::communicator half = world.split(rank % 2);
        int folded = mpi::scan(half, rank + step, mpi::maximum<int>());
        answer = answer * 31 + std::hash<std::string>()(text.str()) % 1000003 + folded;
    }
    std::vector<unsigned long> answers;
    mpi::gather(world, answer, answers, 0);
    if (rank == 0) {
        std::cout << "answer";
        for (unsigned long one : answers) std::cout << ' ' << one;
        std::cout << std::endl;
    }
}
