// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The crates whose unit tests run under emulation, and the tests left out, with their reasons.

use crate::machine::Machine;

/// The crates whose unit tests run.
pub(super) const CRATES: &[&str] = &[
    "af-smc",
    "eventfd-aio",
    "guest-driver",
    "ism-device",
    "ism-sys",
    "smc-c",
    "smc-conform",
    "smc-core",
    "smc-device-plugin",
    "smc-info",
    "smc-rendezvous",
    "smc-settings",
    "smc-test-support",
    "smc-verbs",
    "vfio-user-virtio",
    "vhost-device-ism",
    "virtio-ism",
    "virtio-ism-abi",
];

/// The other crates, with the reason.
pub(super) const NOT_RUN: &[(&str, &str)] = &[
    ("smc-cli", "a program; the crates below the command are run"),
    ("smc-preload", "replaces functions of the libc that the emulator itself stands in for"),
    ("smc-tests", "suites with several processes, namespaces and virtual machines"),
    ("xtask", "runs on the machine of the developer only"),
];

/// A test left out.
pub(super) struct Exception {
    /// `None`: every machine.
    machine: Option<Machine>,
    of: &'static str,
    /// The whole name.
    pub(super) test: &'static str,
    pub(super) reason: &'static str,
}

impl Exception {
    pub(super) fn is_of(&self, machine: Machine, name: &str) -> bool {
        self.machine.is_none_or(|only| only == machine) && self.of == name
    }
}

const AIO: &str = "no io_setup: eventfds are signalled by asynchronous IO";
const CHILD_FILTERS: &str = "no seccomp filters";
const COOKIE: &str = "SO_COOKIE is not translated";
const FLAGS: &str = "/proc/self/smaps and /proc/self/pagemap are those of the emulator";
const FOREIGN: &str = "programs of the developer's machine are of another machine";
const PREADV2: &str = "no preadv2";
const SIGBUS: &str = "a missing page of a file ends the emulator";
const TCP_INFO: &str = "TCP_INFO is not translated";

const fn any(of: &'static str, test: &'static str, reason: &'static str) -> Exception {
    Exception { machine: None, of, test, reason }
}

const fn aarch64(of: &'static str, test: &'static str, reason: &'static str) -> Exception {
    Exception { machine: Some(Machine::Aarch64), of, test, reason }
}

const fn s390x(of: &'static str, test: &'static str, reason: &'static str) -> Exception {
    Exception { machine: Some(Machine::S390x), of, test, reason }
}

/// The tests left out.
pub(super) const EXCEPTIONS: &[Exception] = &[
    any("af-smc", "netlink::tests::the_kernel_knows_its_own_families", "no generic netlink"),
    any(
        "eventfd-aio",
        "tests::a_context_takes_as_many_signals_as_it_has_room_for_and_more_after_a_collection",
        AIO,
    ),
    any("eventfd-aio", "tests::a_context_that_does_not_exist_fails", AIO),
    any(
        "guest-driver",
        "reactor::wait::tests::a_sleeper_on_words_is_woken_by_one_of_them_and_by_its_own_count",
        "no futex_waitv",
    ),
    any("guest-driver", "program_file::tests::a_script_is_what_its_interpreter_is", FOREIGN),
    any("guest-driver", "program_file::tests::an_ordinary_program_has_no_obstacle", FOREIGN),
    any(
        "guest-driver",
        "socket::statistics::tests::a_process_tells_its_connections_and_why_they_are_tcp",
        TCP_INFO,
    ),
    aarch64("guest-driver", "kernel_calls::tests::a_file_tells_which_calls_it_makes", FOREIGN),
    s390x(
        "guest-driver",
        "program_file::tests::sections_are_found_by_few_reads",
        "headers are read as little-endian: smc run is not for this machine",
    ),
    any("ism-device", "shm::bus_error::tests::memory_of_guests_is_left_out_of_core_dumps", FLAGS),
    s390x(
        "ism-device",
        "shm::bus_error::tests::a_page_that_is_gone_reads_as_zero_and_its_owner_is_told",
        SIGBUS,
    ),
    s390x("ism-device", "shm::bus_error::tests::only_the_owner_of_the_page_is_told", SIGBUS),
    any("ism-device", "shm::kick::tests::a_full_counter_does_not_block", AIO),
    any("ism-device", "shm::kick::tests::an_eventfd_is_recognised_and_not_signalled", AIO),
    any("ism-device", "shm::kick::tests::every_kick_counts", AIO),
    any("ism-device", "shm::kick::tests::what_is_no_eventfd_is_refused", AIO),
    any(
        "ism-device",
        "shm::unmap::tests::a_part_of_a_huge_page_leaves_no_mapping",
        "a part of a huge page cannot be mapped",
    ),
    any("ism-sys", "doorbell::tests::every_ring_counts_whichever_threads_ring", AIO),
    any("ism-sys", "doorbell::tests::a_full_counter_does_not_block", AIO),
    any(
        "ism-sys",
        "doorbell::tests::a_doorbell_with_thousands_of_watchers_is_left_alone_for_a_while",
        AIO,
    ),
    any("ism-sys", "doorbell::tests::what_is_no_eventfd_rings_nobody_and_harms_nothing", AIO),
    any("ism-sys", "filters::tests::a_child_finds_what_a_filter_forbids", CHILD_FILTERS),
    any(
        "ism-sys",
        "filters::tests::a_filter_on_arguments_of_others_forbids_nothing",
        CHILD_FILTERS,
    ),
    s390x(
        "ism-sys",
        "saved::tests::a_copy_has_the_bytes_and_shares_no_later_ones",
        "no mremap to the place of a shared mapping",
    ),
    any(
        "ism-sys",
        "shared::tests::pages_of_a_range_are_there_before_they_are_written_and_keep_their_bytes",
        FLAGS,
    ),
    any("ism-sys", "sockopt::tests::bytes_of_both_directions_are_counted", TCP_INFO),
    any("ism-sys", "tcp::tests::a_lent_number_is_not_closed_and_an_own_one_is", COOKIE),
    any("ism-sys", "tcp::tests::a_number_of_another_file_is_neither_lent_nor_there", COOKIE),
    any("ism-sys", "tcp::tests::a_number_that_is_taken_over_is_closed", COOKIE),
    any(
        "vhost-device-ism",
        "service::sandbox::tests::a_broker_that_was_taken_over_reaches_sockets_only",
        CHILD_FILTERS,
    ),
    any(
        "vhost-device-ism",
        "service::sandbox::tests::a_config_reader_that_was_taken_over_opens_files_of_its_directory_only",
        CHILD_FILTERS,
    ),
    any(
        "vhost-device-ism",
        "service::sandbox::tests::a_daemon_that_was_taken_over_reaches_nothing",
        CHILD_FILTERS,
    ),
    any(
        "vhost-device-ism",
        "vhost::call::tests::a_full_or_closed_socket_neither_blocks_nor_fails",
        AIO,
    ),
    any("vhost-device-ism", "vhost::eventfd::tests::tells_eventfds_from_everything_else", AIO),
    aarch64(
        "vhost-device-ism",
        "vhost::eventfd::tests::draining_empties_and_never_blocks",
        PREADV2,
    ),
    aarch64(
        "vhost-device-ism",
        "vhost::eventfd::tests::tells_semaphores_from_counters_and_loses_no_kick",
        PREADV2,
    ),
    aarch64("vhost-device-ism", "vhost::ring::tests::a_semaphore_is_no_kick", PREADV2),
    any(
        "vhost-device-ism",
        "vhost::peer::tests::the_other_end_of_an_own_connection_is_this_process",
        "the network namespace of a socket is not translated",
    ),
    any(
        "virtio-ism",
        "ism::tests::a_thread_that_sleeps_on_the_word_is_woken_without_the_device",
        "no futex_waitv",
    ),
    any("virtio-ism", "ism::tests::a_writer_has_pages_mapped_before_its_bytes_come_there", FLAGS),
];
