"""Process images: a running process tree written to a folder, restored with its ids, memory and open files.

x86-64 Linux only. `start_upper` starts a process so that it can be imaged at any instruction; `check_imageable` lists
what in a process prevents that; `dump_image` writes it; `restore_upper` brings it back.

Names are resolved at first use: the init of a process, which is started at each restore, needs few of these modules.
"""

from typing import TYPE_CHECKING

from remesh.foundation.first_use import names_at_first_use

if TYPE_CHECKING:
    from remesh.carried.images.doctor import Finding as Finding, examine_machine as examine_machine
    from remesh.carried.images.form.image_reader import describe_image as describe_image
    from remesh.carried.images.form.kinds import (
        CHANNEL_PATH as CHANNEL_PATH,
        INNER_PID as INNER_PID,
        SHARED_PATH as SHARED_PATH,
        Command as Command,
        ImageRefusal as ImageRefusal,
        ImageReport as ImageReport,
        NotImageable as NotImageable,
        OpenFilePolicy as OpenFilePolicy,
        Site as Site,
        WrittenFile as WrittenFile,
    )
    from remesh.carried.images.form.written_files import (
        check_written as check_written,
        cut_written as cut_written,
        tell_sampled as tell_sampled,
    )
    from remesh.carried.images.look.ahead import (
        remember_image as remember_image,
        share_hashes as share_hashes,
        start_hashing_ahead as start_hashing_ahead,
    )
    from remesh.carried.images.look.frozen import Frozen as Frozen, freeze as freeze
    from remesh.carried.images.look.inspection import check_imageable as check_imageable
    from remesh.carried.images.look.process_tree import tree_of as tree_of
    from remesh.carried.images.restore.starter import Starter as Starter
    from remesh.carried.images.restore.upper import (
        Upper as Upper,
        restore_upper as restore_upper,
        start_upper as start_upper,
    )
    from remesh.carried.images.write.compaction import compact_image as compact_image
    from remesh.carried.images.write.dump import dump_image as dump_image
else:
    __getattr__, __dir__ = names_at_first_use(__name__)
