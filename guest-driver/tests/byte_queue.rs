// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory shared by all queues of a process. The test uses up the memory, and so has a process of its
//! own.

use guest_driver::interpose::ByteQueue;

/// Most bytes in all queues of a process.
const LIMIT: usize = 128 << 20;

#[test]
fn all_queues_of_a_process_have_128_mib_and_no_more() {
    let piece = vec![7; 4 << 20];
    let mut queues: Vec<ByteQueue> = Vec::new();
    loop {
        let mut queue = ByteQueue::default();
        let n = queue.append(&piece, usize::MAX);
        queues.push(queue);
        if n < piece.len() {
            break;
        }
    }
    let all: usize = queues.iter().map(ByteQueue::len).sum();
    assert_eq!(all, LIMIT);
    assert!(queues.iter().all(|queue| !queue.may_grow()));
    drop(queues);
    assert_eq!(ByteQueue::default().append(&piece, usize::MAX), piece.len());
}
